"""The options of `halfstep check`, each one by name, through the command itself."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from check_toys import use_toys
from halfstep.check.project import find_project
from halfstep.check.registry import all_rules
from halfstep.cli import cli, main
from halfstep.cli.check import FORMATS, command
from halfstep.report.check_tables import rules_as_text

DOCS = Path(__file__).parents[2] / "docs" / "check.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Toy rules, and a current folder with one file, outside the user's cache."""
    use_toys(monkeypatch)
    find_project.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".xdg"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("import torch\nBAD\nHMM\n")
    return tmp_path


def run(*args, **options):
    find_project.cache_clear()
    return CliRunner().invoke(cli, ["check", *args], **options)


def fails(capsys, *args):
    """The exit code and the one line of a run that cannot start."""
    find_project.cache_clear()
    with pytest.raises(SystemExit) as stop:
        main(["check", *args])
    return stop.value.code, capsys.readouterr().err


def test_every_option_is_documented():
    """In docs/check.md, by its name; so are the formats and the keys of pyproject.toml."""
    text = DOCS.read_text()
    names = [
        name for option in command.params for name in (*option.opts, *option.secondary_opts) if name.startswith("--")
    ]
    assert [name for name in names if f"`{name}" not in text and f" {name}" not in text] == []
    assert [name for name in FORMATS if f"`{name}`" not in text] == []
    from halfstep.check.project import _KEYS

    assert [key for key in _KEYS if key not in text] == []


def test_no_page_has_a_placeholder_url():
    """Addresses that nobody replaced would be copied by users."""
    root = DOCS.parents[1]
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *root.glob("*.yaml"), *root.glob("*.toml")]
    assert [str(page) for page in pages if re.search(r"github\.com/(your|example|org|user)\b", page.read_text())] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broken.py", "import torch\nscaler = torch.amp.GradScaler('cuda'\n"),
        ("unrelated.py", "def f(:\n"),
        ("ds.json", '{"fp16": {"enabled": true}, {% if zero %} "zero_optimization": {} {% endif %}}'),
        ("any.yaml", "a: [1\n"),
        ("any.toml", "a = \n"),
        ("broken.ipynb", "{"),
        ("latin.py", b"x = '\xe9'\n"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_an_error_that_ignoring_advice_does_not_hide(folder, name, text):
    """Exit code 3, and the finding."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    result = run(name, "--ignore", "advice")
    assert result.exit_code == 3
    assert re.search(rf"{name}:\d+:\d+: HS00[24] \[error\]", result.output)


def test_a_broken_script_in_a_folder_is_an_error_and_broken_data_is_not(folder):
    """A YAML file that is no configuration may be a template of anything."""
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "chart.yaml").write_text("{{- if .Values.x }}\na: [\n")
    result = run("--ignore", "advice")
    assert "broken.py:1:7: HS004 [error]" in result.output
    assert "chart.yaml" not in result.output


def test_python_newer_than_the_interpreter_is_checked(folder):
    """Not skipped with a syntax error."""
    (folder / "new.py").write_text('type A = int\nprint(f"{x["a"]}")\nBAD\n')
    assert "new.py:3:1: HS901" in run("new.py").output
    assert "HS004" not in run("new.py").output


def test_statistics(folder):
    """One line per rule, most frequent first; the exit code is that of the findings."""
    (folder / "a.py").write_text("BAD\nHMM\nHMM\n")
    result = run("--statistics")
    assert result.exit_code == 3
    assert result.output == "2  HS902  advice   [ ] hmm-word\n1  HS901  error    [*] bad-word\n"
    rows = json.loads(run("--statistics", "--format", "json").output)
    assert rows[0] == {"code": "HS902", "name": "hmm-word", "severity": "advice", "count": 2, "fixable": False}
    (folder / "a.py").write_text("x = 1\n")
    assert (run("--statistics").exit_code, run("--statistics").output) == (0, "")


def test_exit_zero(folder):
    """Findings are shown, and the exit code is 0; other failures keep theirs."""
    result = run("--exit-zero")
    assert result.exit_code == 0
    assert "HS901" in result.output
    assert run("--exit-zero", "--format", "xml").exit_code == 2


def test_list_rules(folder, monkeypatch):
    """Every rule with severity, fixable and preview."""
    monkeypatch.undo()
    result = run("--list-rules")
    assert result.exit_code == 0
    head, *lines = result.output.splitlines()
    assert head.split() == ["code", "name", "severity", "fixable", "preview", "title"]
    assert any(re.match(r"HS104 +clip-before-unscale +error +yes ", line) for line in lines)
    rows = json.loads(run("--list-rules", "--format", "json").output)
    assert len(rows) == len(lines)
    assert set(rows[0]) == {"code", "name", "severity", "fixable", "preview", "title"}


@pytest.mark.parametrize("width", [60, 80])
def test_list_rules_is_folded_where_the_table_does_not_fit(width):
    """Every rule has its code, name and kind on one line and its title below, and no line is wider than the terminal."""
    lines = rules_as_text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [rule.code for rule in all_rules()]
    assert "HS104 clip-before-unscale (error, fixable)" in lines
    assert rules_as_text(1000) == rules_as_text()


def test_preview(folder, capsys):
    """Rules in preview run only when asked, by the option or the project."""
    (folder / "a.py").write_text("SOON\n")
    assert run().exit_code == 0
    assert "HS909" in run("--preview").output
    assert "HS909" in run("--preview", "--select", "HS909").output
    (folder / "pyproject.toml").write_text("[tool.halfstep.check]\npreview = true\n")
    assert "HS909" in run().output
    assert run("--no-preview").exit_code == 0


def test_selecting_a_preview_rule_without_preview_is_an_error(folder, capsys):
    """It would report nothing, which looks like a clean result."""
    code, message = fails(capsys, "--select", "HS909")
    assert (code, message.count("\n")) == (1, 1)
    assert "--preview" in message


def test_a_comment_for_a_preview_rule_is_not_unused_without_it(folder):
    """The rule did not run."""
    (folder / "a.py").write_text("SOON  # halfstep: ignore[HS909] known\n")
    assert run().exit_code == 0
    assert run("--preview").exit_code == 0


def test_baseline(folder, capsys):
    """Written once, then only new findings are reported, by the option or by the project."""
    result = run("--write-baseline", "base.json")
    assert (result.exit_code, result.output) == (0, "1 file checked, 2 findings written to base.json.\n")
    result = run("a.py", "--baseline", "base.json")
    assert (result.exit_code, result.output) == (0, "1 file checked, no findings (2 in the baseline).\n")
    (folder / "a.py").write_text("import torch\nBAD\nHMM\nx = HMM\n")
    assert run("a.py").output.count("HS902") == 2
    (folder / "pyproject.toml").write_text("[tool.halfstep.check]\nbaseline = 'base.json'\n")
    result = run("a.py")
    assert result.output.count("HS90") == 1
    assert "a.py:4:5: HS902" in result.output
    assert fails(capsys, "--baseline", "gone.json")[0] == 1


def test_a_baseline_of_the_project_can_be_written_again(folder):
    """The findings are recorded in full, not minus the old baseline."""
    (folder / "pyproject.toml").write_text("[tool.halfstep.check]\nbaseline = 'base.json'\n")
    run("--write-baseline", "base.json")
    assert "2 findings written" in run("--write-baseline", "base.json").output


def test_gitignore_options(folder):
    """Ignored files are skipped, unless asked."""
    subprocess.run(["git", "init", "-q"], check=True, cwd=folder)
    (folder / ".gitignore").write_text("a.py\n")
    assert run().exit_code == 0
    assert run("--no-respect-gitignore").exit_code == 3
    assert run("a.py").exit_code == 3
    (folder / "pyproject.toml").write_text("[tool.halfstep.check]\nrespect-gitignore = false\n")
    assert run().exit_code == 3
    assert run("--respect-gitignore").exit_code == 0


def test_force_exclude(folder):
    """A hook names every file: `exclude` applies, unknown types and data that does not parse are skipped."""
    (folder / "pyproject.toml").write_text("[tool.halfstep.check]\nexclude = ['a.py']\n")
    (folder / "chart.yaml").write_text("{{- if .Values.x }}\na: [\n")
    (folder / "notes.txt").write_text("")
    assert run("a.py", "chart.yaml").exit_code == 3
    result = run("a.py", "chart.yaml", "notes.txt", "--force-exclude")
    assert (result.exit_code, result.output) == (0, "1 file checked, no findings.\n")
    (folder / "b.py").write_text("BAD\n")
    assert run("b.py", "--force-exclude").exit_code == 3


def test_cache_options(folder):
    """Results are stored where asked, in the project by default, and not at all without a cache."""
    (folder / "pyproject.toml").write_text("")
    expected = run("--no-cache").output
    assert not (folder / ".halfstep_cache").exists()
    assert run("--cache-dir", "mine").output == run("--cache-dir", "mine").output == expected
    assert list((folder / "mine").glob("check-*.json"))
    assert run().output == run().output == expected
    assert list((folder / ".halfstep_cache").glob("check-*.json"))
    assert run("--fix").exit_code == 3
    assert "FINE" in (folder / "a.py").read_text()
    assert "HS901" not in run().output


@pytest.mark.parametrize("style", FORMATS)
def test_every_format_is_rendered_with_and_without_findings(folder, style):
    """And the ones for machines parse."""
    for text in ("BAD\n", "x = 1\n"):
        (folder / "a.py").write_text(text)
        result = run("--format", style)
        assert result.exit_code == (3 if "BAD" in text else 0)
        if style in {"json", "sarif", "gitlab"}:
            json.loads(result.output)
        elif style == "junit":
            ET.fromstring(result.output.encode())


@pytest.mark.parametrize(
    "args",
    [
        ("--statistics", "--format", "sarif"),
        ("--list-rules", "--format", "junit"),
        ("--statistics", "--diff"),
        ("--write-baseline", "b.json", "--fix"),
        ("--write-baseline", "b.json", "--baseline", "b.json"),
        ("--write-baseline", "b.json", "-"),
        ("--no-cache", "--cache-dir", "x"),
        ("--baseline",),
        ("--format", "xml"),
    ],
)
def test_options_without_effect_are_usage_errors(folder, args):
    """Exit code 2 and a message, before any file is read."""
    result = run(*args)
    assert result.exit_code == 2
    assert "Error: " in result.output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("preview = 1", "preview is 1; write true or false"),
        ("respect-gitignore = 'no'", "respect-gitignore is 'no'; write true or false"),
        ("baseline = 3", "baseline is 3; write a string"),
        ("respect_gitignore = true", "respect-gitignore"),
        ("baseline = 'gone.json'", "Cannot read the baseline"),
    ],
)
def test_a_bad_value_in_the_project_is_one_line(folder, capsys, line, words):
    """Exit code 1, no traceback."""
    (folder / "pyproject.toml").write_text(f"[tool.halfstep.check]\n{line}\n")
    code, message = fails(capsys, "a.py")
    assert (code, message.count("\n")) == (1, 1)
    assert words in message


def test_the_cache_is_used_by_the_installed_command(tmp_path):
    """Two processes in a project: the same output, and results stored between them."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "a.py").write_text(
        "import torch\nscaler = torch.cuda.amp.GradScaler()\nloss.backward()\nscaler.step(o)\n"
    )
    command_line = [sys.executable, "-m", "halfstep", "check", "--format", "concise"]
    outputs = [subprocess.run(command_line, cwd=tmp_path, capture_output=True, check=False) for _ in range(2)]
    assert outputs[0].stdout == outputs[1].stdout != b""
    assert [o.returncode for o in outputs] == [3, 3]
    assert list((tmp_path / ".halfstep_cache").glob("check-*.json"))
