"""Patterns of .gitignore: the same files as `git check-ignore` reports."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from halfstep.check.project import find_project
from halfstep.check.walk import find_files

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="compares with git")

FILES = (
    "a.py", "b.py", "ab.py", "a b.py", "#x.py", "!x.py", "x].py", "sub/a.py", "sub/b.py", "sub/deep/a.py", "sub/deep/er/c.py",
    "out/a.py", "out/keep/a.py", "logs/x.json", "logs/y.json", "data/1.yaml", "data/22.yaml", "doc/frotz/a.py", "frotz/a.py",
    "A.py", "trail .py", "sub/out/z.py", "sub/logs/w.json", "x-y.py", "foo/bar/baz/q.py", "foo/q.py", "foo/bar/q.py",
)  # fmt: skip
CASES = (
    "a.py\n", "/a.py\n", "sub/a.py\n", "*.py\n!b.py\n", "out/\n!out/keep/a.py\n", "out/*\n!out/keep/\n", "# note\n\\#x.py\n",
    "\\!x.py\n", "a*.py\n!ab.py\n", "**/a.py\n", "sub/**\n", "sub/**/c.py\n", "**/deep/**\n", "logs\n", "/logs/\n", "logs/*.json\n",
    "data/[0-9].yaml\n", "data/[!2]*.yaml\n", "data/[[:digit:]][[:digit:]].yaml\n", "doc/frotz/\n", "frotz/\n", "a?b.py\n",
    "[Aa].py\n", "trail .py   \n", "a\\ b.py\n", "x].py\n", "[x]].py\n", "[]x]*.py\n", "x[a-z-]y.py\n", "foo/**/q.py\n", "foo**/q.py\n", "foo/ba**\n", "foo/b?r**\n", "foo/b**r/q.py\n",
    "foo/*/q.py\n", "*\n!*/\n!a.py\n", "a.py\r\nb.py\r\n", "\ufeffa.py\n", "[abc\n", "a.py\\\n", "/\n", "**\n!sub/\n", "*/a.py\n", "/*\n!/sub\n",
    "su[^x]/\n", "x[!.]y.py\n", "sub/deep\n!sub/deep/er\n", "!a.py\na.py\n", "a.py\n!a.py\n", "b.py  # not a comment\n",
)  # fmt: skip


def make_tree(root: Path, ignores: dict[str, str]) -> None:
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    for folder, text in ignores.items():
        (root / folder / ".gitignore").write_text(text, newline="")
    subprocess.run(["git", "init", "-q", str(root)], check=True)


def not_ignored_by_git(root: Path) -> set[str]:
    command = ["git", "-c", "core.excludesFile=", "ls-files", "-z", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
    return {name for name in names if name in FILES}


def walked(root: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    find_project.cache_clear()
    monkeypatch.chdir(root)
    return {target.path for target in find_files(["."])}


@pytest.mark.parametrize("text", CASES)
def test_one_file_of_patterns_means_what_it_means_to_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Wildcards, classes, anchors, negation and escapes."""
    make_tree(tmp_path, {"": text})
    assert walked(tmp_path, monkeypatch) == not_ignored_by_git(tmp_path)


@pytest.mark.parametrize(
    "ignores",
    [
        {"": "*.py\n", "sub": "!a.py\n"},
        {"": "!sub/a.py\n", "sub": "a.py\n"},
        {"": "sub/\n", "sub": "!*\n"},
        {"sub": "/deep\n", "sub/deep": "!*\n"},
        {"": "*\n!*/\n", "sub/deep": "!/a.py\n", "foo": "!**/q.py\n"},
    ],
)
def test_a_deeper_file_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: dict[str, str]
) -> None:
    """But nothing in an ignored folder is included again."""
    make_tree(tmp_path, ignores)
    assert walked(tmp_path, monkeypatch) == not_ignored_by_git(tmp_path)


def test_random_patterns_agree_with_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns put together at random, in three folders at once."""
    draw = random.Random(0)
    pieces = (
        "*",
        "**",
        "?",
        "a",
        "b",
        "sub",
        "deep",
        "out",
        "/",
        "/",
        "!",
        "[ab]",
        "[!a]",
        ".py",
        "foo",
        "\\",
        "q",
        " ",
        "#",
    )
    make_tree(tmp_path, {})
    for _ in range(60):
        for folder in ("", "sub", "foo"):
            lines = ["".join(draw.choices(pieces, k=draw.randint(1, 5))) for _ in range(draw.randint(0, 4))]
            (tmp_path / folder / ".gitignore").write_text("\n".join(lines) + "\n")
        patterns = [(tmp_path / folder / ".gitignore").read_text() for folder in ("", "sub", "foo")]
        assert walked(tmp_path, monkeypatch) == not_ignored_by_git(tmp_path), patterns


def test_patterns_above_a_named_folder_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder inside a repository is checked under the patterns of the root, and of .git/info/exclude."""
    make_tree(tmp_path, {"": "c.py\n"})
    (tmp_path / ".git/info/exclude").write_text("sub/b.py\n")
    find_project.cache_clear()
    monkeypatch.chdir(tmp_path / "sub")
    assert {target.path for target in find_files(["."])} == {"a.py", "deep/a.py", "out/z.py", "logs/w.json"}
    assert {target.path for target in find_files(["../sub/deep"])} == {"../sub/deep/a.py"}


def test_a_repository_inside_another_has_its_own_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer patterns end at its root."""
    make_tree(tmp_path, {"": "a.py\n"})
    subprocess.run(["git", "init", "-q", str(tmp_path / "sub")], check=True)
    files = walked(tmp_path, monkeypatch)
    assert "sub/a.py" in files
    assert "foo/q.py" in files
    assert "a.py" not in files


def test_gitignore_can_be_disregarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the call, or by the project; a named file is checked in any case."""
    make_tree(tmp_path, {"": "*.py\n"})
    assert not any(name.endswith(".py") for name in walked(tmp_path, monkeypatch))
    assert [target.path for target in find_files(["a.py"])] == ["a.py"]
    assert {target.path for target in find_files(["."], gitignore=False)} == set(FILES)
    (tmp_path / "pyproject.toml").write_text("[tool.halfstep.check]\nrespect-gitignore = false\n")
    assert walked(tmp_path, monkeypatch) == set(FILES)
    assert len(find_files(["."], gitignore=True)) < len(FILES)
