"""One file through its rules: a failure becomes a finding, and the rest is still checked."""

import json
import os
import stat
import sys

import pytest

from check_toys import use_toys
from halfstep.check.files.document import MAX_BYTES, read_document
from halfstep.check.files.source import Settings, Source
from halfstep.check.options import Options
from halfstep.check.project import Project
from halfstep.check.runner import check_document, check_target, failure
from halfstep.check.select import Selection
from halfstep.check.walk import Target


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Toy rules throughout."""
    use_toys(monkeypatch)


def check(data, path="a.py", language="python", **options):
    document = read_document(path, data if isinstance(data, bytes) else data.encode(), language)
    return check_document(document, Settings(), Selection(**options))


def on_disk(path, language="python", *, named=True):
    return check_target(Target(str(path), language, Project(), named), Options())


def test_findings_come_in_order_and_once():
    """Findings are sorted by line and column, not by rule."""
    findings = check("HMM\nBAD; HMM\nBAD")
    assert [(f.line, f.column, f.code) for f in findings] == [
        (1, 1, "HS902"),
        (2, 1, "HS901"),
        (2, 6, "HS902"),
        (3, 1, "HS901"),
    ]


def test_a_rule_that_fails_is_a_finding_and_the_others_run():
    """A bug in one rule neither stops the check nor hides other findings."""
    failure, bad = check("CRASH = 1\nBAD")
    assert (failure.code, failure.severity, bad.code) == ("HS006", "warning", "HS901")
    assert "HS903 (crash-word) failed on this file: KeyError: 'CRASH'" in failure.message


@pytest.mark.parametrize("text", ["def f(:", "x = (", "'''", "\tx\n  y", "if x:\n", "x = 08", "f'{'"])
def test_python_that_does_not_parse_is_one_finding(text):
    """The only finding is HS004, with a place and the version of Python that parsed it."""
    (finding,) = check(text)
    assert (finding.code, finding.severity) == ("HS004", "error")
    assert f"not valid Python 3.{sys.version_info.minor}: " in finding.message
    assert "?." not in finding.message
    assert finding.line >= 1
    assert finding.column >= 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "import torch\nwith torch.autocast('cuda', enabled=True,\n    dtype=torch.float16,\n    enabled=flag): pass\n",
            4,
        ),
        ("import torch\n\ndef f(x):\n    return g(torch.autocast('cpu'), a=1, **x, a=1)\n", 4),
        ("import torch\nscaler = torch.amp.GradScaler('cuda', enabled=True, init_scale=2.0, enabled=True)\n", 2),
    ],
)
def test_a_keyword_argument_passed_twice(text, line):
    """Python's parser accepts it and its compiler does not: HS004, and the rest of the file is checked."""
    finding, bad = check(text + "BAD\n")
    assert (finding.code, finding.severity, finding.line, bad.code) == ("HS004", "error", line, "HS901")
    assert "keyword argument repeated" in finding.message
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": text}
    (advice,) = check(
        json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), "a.ipynb", "notebook"
    )
    assert (advice.code, advice.severity) == ("HS004", "advice")


@pytest.mark.parametrize(
    "call", ["f(a=1, **{'a': 2})", "f(**x, **y)", "f(g(a=1), a=1)", "f(a=1), f(a=2)", "f(a=1, b=await x)"]
)
def test_keyword_arguments_that_compile(call):
    """Keys of a dictionary, and of another call, are no repeated keywords."""
    assert check(f"import torch\nwith torch.autocast('cuda'):\n    {call}\n") == ()


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "-" * 100_000 + "1",
        "float16\nx = a" + ".b" * 50_000,
        "float16\nx = " + "+".join("a" * 50_000),
        "float16\n" + "".join(" " * i + "if x:\n" for i in range(90)) + " " * 90 + "y",
        "(" * 100_000,
        "x = " + "[" * 150 + "]" * 150,
        "x = " + "9" * 10_000,
        "float16\nx = " + "lambda: " * 3000 + "1",
        "f(" * 190 + ")" * 190,
    ],
    ids=range(9),
)
def test_deep_and_long_files_end_in_at_most_one_finding(text):
    """The parser's limits are findings, not crashes."""
    findings = check(text)
    assert len(findings) <= 1
    assert all(f.code in {"HS004", "HS005"} for f in findings)


def test_warnings_of_the_parser_are_not_shown(recwarn):
    """Invalid escapes in a script cause no warning."""
    assert check("x = '\\d float16'\ny = 1 is 1") == ()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("language", "text"),
    [
        *(("json", text) for text in ('{"a": ', "[1, 2", '{"a" 1}', '{"a": "unclosed')),
        *(("yaml", text) for text in ("a: [1, 2", "a: b: c", "\tx: 1", "a: *undefined\nb: [")),
    ],
)
def test_json_and_yaml_that_do_not_parse_are_one_finding(language, text):
    """A file that the user named gives HS004 with a place, even if it is not a known configuration."""
    (finding,) = check(text, f"a.{language}", language)
    assert finding.code == "HS004"
    assert 1 <= finding.line <= text.count("\n") + 1


def test_a_configuration_that_does_not_parse_is_an_error():
    """Whether or not it is clearly a configuration: the user named it, and it was not checked."""
    (finding,) = check(
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}', "a.json", "json"
    )
    assert (finding.code, finding.severity) == ("HS004", "error")
    (other,) = check('{"name": "x", ', "a.json", "json")
    assert other.severity == "error"
    (template,) = check(
        '{"fp16": {"enabled": true}, {% if zero %} "zero_optimization": {} {% endif %}}', "a.json", "json"
    )
    assert (template.code, template.severity) == ("HS004", "error")


def test_other_files_of_a_folder_are_not_reported(tmp_path):
    """Data next to the code: JSON that is invalid, binary or huge, and not a configuration, gives no finding."""
    for name, data in (("a.json", b'{"a": '), ("b.json", b"\xff\0"), ("c.json", b"1" * (MAX_BYTES + 1))):
        (tmp_path / name).write_bytes(data)
        assert on_disk(tmp_path / name, "json", named=False).findings == ()
        assert len(on_disk(tmp_path / name, "json").findings) == 1


def test_a_file_that_vanished_or_may_not_be_read_is_a_finding(tmp_path):
    """HS001 with the message of the operating system."""
    (gone,) = on_disk(tmp_path / "gone.py").findings
    assert (gone.code, "No such file" in gone.message) == ("HS001", True)
    (folder,) = on_disk(tmp_path).findings
    assert folder.code == "HS001"
    path = tmp_path / "secret.py"
    path.write_text("x = 1")
    path.chmod(0)
    if not os.access(path, os.R_OK):  # root may read everything
        assert on_disk(path).findings[0].code == "HS001"
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Requires: [named pipes]")
def test_a_pipe_is_not_opened(tmp_path):
    """Opening a named pipe would block forever; it gives HS001."""
    os.mkfifo(tmp_path / "pipe.py")
    assert on_disk(tmp_path / "pipe.py").findings[0].code == "HS001"


def test_only_wanted_findings_are_given():
    """Selecting and ignoring apply to findings about files too."""
    assert [f.code for f in check("BAD\nHMM", select=("HS902",))] == ["HS902"]
    assert check(b"\0", ignore=("not-text",)) == ()


def test_nothing_that_is_checked_is_run(tmp_path):
    """A script that would create a file does not create it."""
    trace = tmp_path / "trace"
    check(f"float16 = open({str(trace)!r}, 'w')\nimport this_is_no_module\n__import__('os').abort()")
    assert not trace.exists()
    assert "this_is_no_module" not in sys.modules


def test_a_large_script_is_an_error_if_named_and_advice_in_a_folder(tmp_path):
    """Generated code in a folder is not the user's concern; a file that the user named is."""
    (tmp_path / "big.py").write_bytes(b"x = 1\n" * (MAX_BYTES // 6 + 1))
    severities = [on_disk(tmp_path / "big.py", named=named).findings[0].severity for named in (True, False)]
    assert severities == ["error", "advice"]


def test_python_newer_than_the_interpreter_is_checked():
    """Nested quotes, `type` statements and bare exception lists do not hide the findings of the file."""
    text = 'type A = int\ntry:\n    print(f"{x["a"]}")\nexcept KeyError, ValueError:\n    BAD\n'
    assert [(f.code, f.line, f.column) for f in check(text)] == [("HS901", 5, 5)]


def test_a_failure_names_no_address():
    """The message for a rule that crashed is the same in every run."""
    error = KeyError(object())
    assert " at 0x" in str(error)
    assert " at 0x" not in failure(Source("train.py", "", "python"), "HS170", error).message
