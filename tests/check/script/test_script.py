"""What is read of a whole script."""

import ast
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from check_scripts import RULES, findings, script
from halfstep.check import check_path
from halfstep.check.files.source import Cell, Settings, Source
from halfstep.check.script.script import read_script
from halfstep.check.script.syntax.relevant import RuleWords
from work_counter import num_lines


def test_a_text_about_something_else_is_not_parsed():
    """Most files of a project mention nothing of mixed precision, and cost only a search."""
    facts = script("def f(:\n")
    assert not facts.about
    assert facts.traces == ()


def test_words_of_a_rule_make_a_script_relevant():
    """A script that mentions no mixed precision is read if it contains a word that a rule declares."""
    source = Source("train.py", "torch.autograd.set_detect_anomaly(True)\n", "python")
    assert not read_script(source, Settings()).about
    assert "set_detect_anomaly" in read_script(source, Settings(), RuleWords(("set_detect_anomaly",))).outline.calls


def test_lines_of_a_rule_need_a_mention_of_precision():
    """A word that matters only next to a 16-bit format does not make a script relevant by itself."""
    words = RuleWords(lines=("CrossEntropyLoss",))
    plain = Source("train.py", "loss = CrossEntropyLoss()\n", "python")
    assert not read_script(plain, Settings(), words).about
    option = Source("train.py", "loss = CrossEntropyLoss()\nuse(fp16)\n", "python")
    assert "CrossEntropyLoss" in read_script(option, Settings(), words).outline.calls
    assert "CrossEntropyLoss" not in read_script(option, Settings()).outline.calls


@pytest.mark.parametrize(
    "mention",
    [
        "# leaves any autocast region",
        "with maybe_autocast(enabled=False):\n    x = x.float()",
        "from ...integrations.deepspeed import is_deepspeed_zero3_enabled\nif is_deepspeed_zero3_enabled():\n"
        "    import deepspeed\n    with deepspeed.zero.GatheredParameters(w):\n        x = 2\n",
    ],
)
def test_comments_and_helpers_make_only_a_script_relevant_that_trains(mention):
    """A model whose comment names autocast, which leaves it by a helper of another file, or gathers its shards, is not read."""
    assert not script(f"x = 1\n{mention}\n").about
    assert script(f"x = 1\n{mention}\nloss.backward()\n").about
    assert script(f"x = 1\n{mention}\ny = x.half()\n").about


def test_broken_python_is_a_syntax_error():
    """What is not Python raises SyntaxError, for the caller to report."""
    with pytest.raises(SyntaxError):
        script("autocast(\n")


def test_places_count_from_one_in_characters():
    """Lines and columns are those of an editor, also behind letters of several bytes."""
    (finding,) = findings('import torch\nx = "\u4e2d\u4e2d"; y = torch.cuda.amp.GradScaler()\n', "HS190")
    assert (finding.line, finding.column, finding.end_line) == (2, 15, 2)


def test_places_in_a_notebook_are_inside_their_cell():
    """A finding in a notebook names the cell and counts its lines."""
    text = "import torch\n\nwith torch.cuda.amp.autocast():\n    pass\n"
    facts = read_script(Source("n.ipynb", text, "notebook", (Cell(1, 1, 2), Cell(4, 3, 2))), Settings())
    (finding,) = [f for rule in RULES for f in rule().check(facts)]
    assert (finding.cell, finding.line, finding.column) == (4, 1, 6)


def test_autocasts_are_listed_with_their_places():
    """Every autocast call is a fact with format and place, in the order of the text."""
    facts = script("import torch\na = torch.autocast('cuda')\nb = torch.autocast('cuda', dtype=torch.bfloat16)\n")
    assert [(a.dtype, a.where.line) for a in facts.autocasts] == [("float16", 2), ("bfloat16", 3)]


PIECES = (
    "scaler = torch.amp.GradScaler('cuda')", "scaler.scale(loss).backward()", "loss.backward()", "scaler.step(optimizer)",
    "optimizer.step()", "scaler.update()", "scaler.unscale_(optimizer)", "torch.nn.utils.clip_grad_norm_(p, 1)",
    "optimizer.zero_grad()", "loss = loss / n", "model.half()", "torch.save({'o': optimizer.state_dict()}, f)",
    "optimizer.load_state_dict(s['o'])", "p.grad.norm()", "f()", "loss = scaler.scale(loss)", "return loss",
)  # fmt: skip
HEADS = (
    "for x in y:",
    "while True:",
    "if amp:",
    "if (i + 1) % n == 0:",
    "with torch.autocast('cuda'):",
    "def f():",
    "try:",
)


@st.composite
def programs(draw, depth=3):
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        if depth and draw(st.booleans()):
            head = draw(st.sampled_from(HEADS))
            inner = draw(programs(depth=depth - 1))
            lines += [head, *(f"    {line}" for line in inner)]
            if head == "try:":
                lines += ["except RuntimeError:", "    pass"]
        else:
            lines.append(draw(st.sampled_from(PIECES)))
    return lines


@given(programs())
def test_any_training_code_is_read_without_a_crash(lines):
    """Whatever order and nesting a loop has, every rule answers, and every fix parses."""
    text = "import torch\ndef main():\n" + "\n".join(f"    {line}" for line in lines) + "\n"
    for finding in findings(text):
        if finding.fix is not None:
            fixed = text
            for edit in sorted(finding.fix.edits, reverse=True):
                fixed = fixed[: edit.start] + edit.text + fixed[edit.end :]
            ast.parse(fixed)


def test_a_long_elif_chain_is_read():
    """A thousand branches are walked without recursion."""
    text = "import torch\nif a == 0:\n    loss.backward()\n" + "".join(
        f"elif a == {i}:\n    optimizer_{i}.step()\n" for i in range(1, 400)
    )
    assert sum(e.kind == "opt_step" for t in script(text + "# autocast\n").traces for e in t) == 399


def test_reading_does_not_import_torch():
    """Checking a script loads neither torch nor numpy."""
    code = (
        "import sys\nsys.path.insert(0, 'tests')\nimport check_scripts\n"
        "check_scripts.findings('import torch\\nwith torch.cuda.amp.autocast():\\n    pass\\n')\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_work_of_a_script_grows_with_its_length():
    """Reading and judging 160 training functions executes at most 9 times the lines that 20 do."""

    def check(count):
        loops = "".join(
            f"def train_{i}(model, loader, optimizer, scaler):\n    for x in loader:\n        with torch.autocast('cuda'):\n"
            "            loss = model(x)\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
            "        optimizer.zero_grad()\n"
            for i in range(count)
        )
        assert findings("import torch\n" + loops) == []

    check(1)  # what is loaded or cached on first use is not counted
    assert num_lines(check, 160) < 9 * num_lines(check, 20)


def test_a_message_about_another_line_of_a_notebook_counts_as_the_reader_does(tmp_path):
    """The region that a backward is in has its line in its own cell, not in the joined text of all cells."""
    cells = [
        "import torch\nfrom torch import nn\nmodel, optimizer = nn.Linear(2, 2), None",
        "for x, y in loader:\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = loss_fn(model(x), y)\n"
        "        loss.backward()\n    optimizer.step()",
    ]
    notebook = {"nbformat": 4, "cells": [{"cell_type": "code", "source": text} for text in cells]}
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps(notebook))
    (finding,) = [f for f in check_path(path) if f.code == "HS140"]
    assert (finding.cell, finding.line) == (2, 4)
    assert "opened at line 2 of cell 2" in finding.message
