"""Notebooks: cells as Python with places, and fixes that change only the lines they mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.files.document import apply_edits, read_document
from halfstep.check.files.notebook import read_notebook
from halfstep.check.finding import Edit, Finding


def cell(source, kind="code"):
    return {"cell_type": kind, "metadata": {}, "outputs": [], "source": source}


def notebook(*cells, indent=1, **extra):
    return json.dumps(
        {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5, **extra}, indent=indent
    )


def lines(text):
    return text.splitlines(keepends=True)


def test_code_cells_are_joined_and_know_their_place():
    """Markdown cells are left out; a line of the text maps to a line of its cell."""
    raw = notebook(cell("# prose", "markdown"), cell(lines("a = 1\nb = 2")), cell("c = 3\n"))
    read = read_document("n.ipynb", raw.encode(), "notebook")
    assert read.source.text == "a = 1\nb = 2\nc = 3\n"
    assert [(p.cell, p.line) for p in map(read.source.cell_line, (1, 2, 3))] == [(1, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize(
    "magic",
    [
        "%matplotlib inline",
        "!pip install torch",
        "files = !ls",
        "torch?",
        "pip install torch",
        "x = %time f()",
        "?print",
    ],
)
def test_magics_are_replaced_in_place(magic):
    """What IPython alone understands becomes a statement of the same width, and the rest is Python."""
    raw = notebook(cell(f"{magic}\nif True:\n    !ls -l \\\n  more\nx = 1"))
    read = read_notebook("n.ipynb", raw)
    first, *_, last = read.text.split("\n")[:-1]
    assert (first.strip(), len(first), last) == ("0", len(magic), "x = 1")
    assert not read.faults
    compile(read.text, "cell", "exec")


def test_a_percent_sign_that_is_python_stays():
    """A cell that parses as it is, is left as it is."""
    text = "x = ('%d'\n     %y)\n"
    assert read_notebook("n.ipynb", notebook(cell(text))).text == text


def test_cells_of_other_languages_are_blank_and_python_magics_are_read():
    """%%bash hides its cell, %%time does not."""
    read = read_notebook("n.ipynb", notebook(cell("%%bash\nls | wc"), cell("%%time\nx = 1")))
    assert read.text.split() == ["0", "x", "=", "1"]
    assert not read.faults


@pytest.mark.parametrize(
    ("text", "shown"), [("%%write_and_run a.py\nx = 1", ["0", "x", "=", "1"]), ("%%own\nif then else", [])]
)
def test_a_cell_after_an_unknown_magic_is_read_if_it_is_python(text, shown):
    """A notebook's own cell magic, such as one that writes the cell to a file and runs it, hides no Python."""
    read = read_notebook("n.ipynb", notebook(cell(text)))
    assert read.text.split() == shown
    assert not read.faults


def test_a_notebook_in_another_language_is_not_read():
    """R and Julia notebooks have nothing to check."""
    raw = notebook(cell("x <- 1"), metadata={"kernelspec": {"language": "R"}})
    assert read_notebook("n.ipynb", raw).text == ""


def test_a_cell_that_does_not_parse_is_a_note_and_the_others_are_read():
    """One broken cell does not hide the rest."""
    read = read_document("n.ipynb", notebook(cell("x = ("), cell("y = 1")).encode(), "notebook")
    assert "y = 1" in read.source.text
    (note,) = read.notes
    assert (note.code, note.severity, note.cell) == ("HS004", "advice", 1)


@pytest.mark.parametrize(
    "raw", ["{", "[1]", '{"worksheets": []}', '{"cells": 3}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_what_is_no_notebook_is_one_finding(raw):
    """Broken JSON, other JSON and hostile JSON each give one finding."""
    assert isinstance(read_notebook("n.ipynb", raw), Finding)


@pytest.mark.parametrize(
    "odd", [3, "text", None, {"cell_type": "code", "source": 5}, {"cell_type": "code", "source": [1]}, {}]
)
def test_odd_cells_are_passed_over(odd):
    """A cell of the wrong shape is not code."""
    assert read_notebook("n.ipynb", notebook(odd, cell("x = 1"))).text == "x = 1\n"


def test_text_outside_unicode_is_no_trap():
    """A lone surrogate in the JSON is replaced before Python sees it."""
    read = read_notebook("n.ipynb", '{"cells": [{"cell_type": "code", "source": "x = \'\\ud800\'"}]}')
    read.text.encode()


@given(st.data())
def test_a_fix_rewrites_the_changed_lines_only(data):
    """Any edit inside a cell gives the notebook whose cell has the edited text, with every other line of the file as it was."""
    texts = data.draw(
        st.lists(st.sampled_from(["a = 1\nb = 2\nc = 3", "d = 4\n", "e = '\u00e9'\nf = 6\n"]), min_size=1, max_size=3)
    )
    as_list, indent = data.draw(st.booleans()), data.draw(st.sampled_from([1, 2, None]))
    ascii_only = data.draw(st.booleans())
    content = {"cells": [cell(lines(t) if as_list else t) for t in texts], "metadata": {"k": "\u00e9"}, "nbformat": 4}
    raw = json.dumps(content, indent=indent, ensure_ascii=ascii_only) + "\n"
    document = read_document("n.ipynb", raw.encode(), "notebook")
    index = data.draw(st.integers(0, len(texts) - 1))
    text, base = texts[index], document.notebook.parts[index].start
    start = data.draw(st.integers(0, len(text.rstrip("\n"))))
    end = data.draw(st.integers(start, len(text.rstrip("\n"))))
    new = data.draw(st.sampled_from(["", "z", "x = 9\n", "\u00fc"]))
    changed = apply_edits(document, [Edit(base + start, base + end, new)])
    expected = json.loads(raw)
    result = json.loads(changed)
    assert "".join(result["cells"][index]["source"]) == text[:start] + new + text[end:]
    expected["cells"][index]["source"] = result["cells"][index]["source"]
    assert result == expected
    if indent and as_list:
        before, after = raw.split("\n"), changed.decode().split("\n")
        head = 0
        while head < min(len(before), len(after)) and before[head] == after[head]:
            head += 1
        tail = 0
        while tail < min(len(before), len(after)) - head and before[-1 - tail] == after[-1 - tail]:
            tail += 1
        assert len(before) - head - tail <= text[start:end].count("\n") + 2


def test_a_line_added_after_the_last_line_stays_in_its_cell():
    """Both ways of saying "after this line" lead to the cell of the line."""
    document = read_document("n.ipynb", notebook(cell(lines("if a:\n    b")), cell("c")).encode(), "notebook")
    after_line = json.loads(apply_edits(document, [Edit(11, 11, "\n    new")]))
    before_next = json.loads(apply_edits(document, [Edit(12, 12, "    new\n")]))
    assert "".join(after_line["cells"][0]["source"]) == "if a:\n    b\n    new"
    assert before_next == after_line


def test_an_edit_of_a_magic_is_rejected():
    """What was replaced to be read as Python is not the user's text."""
    document = read_document("n.ipynb", notebook(cell("!ls\nx = 1")).encode(), "notebook")
    assert apply_edits(document, [Edit(0, 3, "y")]) is None


@pytest.mark.parametrize(
    ("start", "end", "new", "left"),
    [
        (0, 2, "", ["b\n", "c"]),
        (2, 4, "", ["a\n", "c"]),
        (3, 5, "", ["a\n", "b"]),
        (0, 0, "z\n", ["z\n", "a\n", "b\n", "c"]),
        (5, 5, "\nz", ["a\n", "b\n", "c\n", "z"]),
        (0, 5, "", []),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_lines_are_taken_away_and_added_as_elements(start, end, new, left, indent):
    """The list of lines stays a list of lines, wherever the change is."""
    document = read_document("n.ipynb", notebook(cell(["a\n", "b\n", "c"]), indent=indent).encode(), "notebook")
    changed = json.loads(apply_edits(document, [Edit(start, end, new)]))
    assert changed["cells"][0]["source"] == left


@pytest.mark.parametrize("indent", [None, 1])
def test_a_cell_of_one_line_gets_a_second(indent):
    """With the spacing of the file."""
    raw = notebook(cell(["a"]), indent=indent)
    document = read_document("n.ipynb", raw.encode(), "notebook")
    assert apply_edits(document, [Edit(1, 1, "\nb")]).decode() == notebook(cell(["a\n", "b"]), indent=indent)


@pytest.mark.parametrize("raw", ["", " \n"])
def test_an_empty_file_is_a_notebook_without_code(raw):
    """A file that was created and never written gives no finding."""
    assert not isinstance(read_notebook("new.ipynb", raw), Finding)
