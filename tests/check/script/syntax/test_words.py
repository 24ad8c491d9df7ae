"""Words are found with few searches, and none is missed."""

import pytest

from halfstep.check.registry import words_of_rules
from halfstep.check.script.syntax.words import _by_part, contains_any, without_comments, without_documentation, words_in

WORDS = ('"--fp16"', "fp16: bool", "fp16", "autocast", "t5-large", "flan-t5")


@pytest.mark.parametrize(
    ("text", "present"),
    [
        ("", []),
        ("fp16", ["fp16"]),
        ('parser.add_argument("--fp16")', ['"--fp16"', "fp16"]),
        ("    fp16: bool = False", ["fp16", "fp16: bool"]),
        ("with autocast():", ["autocast"]),
        ("google/flan-t5", ["flan-t5"]),
        ("google/t5-small", []),
    ],
)
def test_words_are_those_that_the_text_contains(text, present):
    """As a search for each word would find them."""
    assert sorted(words_in(text, WORDS)) == present
    assert contains_any(text, WORDS) is bool(present)


def test_each_word_of_the_rules_is_found():
    """Every word that a rule declares is found in a text of that word alone."""
    words = (*words_of_rules("script").words, *words_of_rules("script").lines)
    assert [word for word in words if word not in words_in(word, words) or not contains_any(word, words)] == []


def test_words_that_share_a_part_are_one_search():
    """A text without the part is searched once for all of them."""
    assert [part for part, _ in _by_part(('"--fp16"', "fp16: bool", "autocast"))] == ["fp16", "autocast"]


def test_what_one_text_contains_is_not_assumed_of_another():
    """Parts are remembered for the last text only, whichever list of words they come from."""
    assert contains_any("use_fp16 = True", ("fp16",))
    assert not contains_any("use_fp16 = True", ('"--fp16"', "deepspeed"))
    assert not contains_any("use_tf32 = True", ("fp16", "deepspeed"))
    assert contains_any("deepspeed.initialize()", ("fp16", "deepspeed"))


@pytest.mark.parametrize(
    "text",
    [
        '"""Uses fp16."""\nx = 1\n',
        'def f():\n    r"""\n    fp16\n    """\n    return 1\n',
        'print("""fp16""")\nx = """\nfp16\n"""\n',
    ],
)
def test_what_only_a_docstring_says_is_no_code(text):
    """A word inside triple quotes is left out, and what is around them stays."""
    code = without_documentation(text)
    assert "fp16" not in code
    assert code.count("x = ") == text.count("x = ")


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        'f"""{fp16}"""\nx = """a"""\n',
        'rf"""{fp16}"""\n',
        '# """\nuse(fp16)\nx = """\n"""\n"""',
        'quotes = \'"""\'\nuse(fp16)\nothers = \'"""\'\n',
        '"""a\\"""b"""\nuse(fp16)\n""" """\n',
        "x = '''a'''\ny = \"\"\"fp16\"\"\"\n",
        '"""open',
    ],
)
def test_a_text_whose_quotes_prove_nothing_stays_whole(text):
    """Comments, other strings, backslashes and f-strings make the quotes ambiguous."""
    assert without_documentation(text) is text


def test_a_comment_on_a_line_of_its_own_is_no_code():
    """Also on the first line and after an indent; one behind a statement stays, because a string may contain the sign."""
    assert without_comments("# fp16\nx = 1\n    # fp16\ny = '#fp16'\n") == "\n\nx = 1\n\ny = '#fp16'\n"


@pytest.mark.parametrize("quotes", ['"""', "'''"])
def test_lines_of_a_long_string_are_no_comments(quotes):
    """A text with triple quotes stays whole."""
    text = f"x = {quotes}\n# fp16\n{quotes}\n"
    assert without_comments(text) is text
