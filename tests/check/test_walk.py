"""Which files are checked for a path."""

import pytest

from halfstep.check.project import find_project
from halfstep.check.walk import find_files
from halfstep.errors import SettingError


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The current folder, with files of every kind."""
    find_project.cache_clear()
    monkeypatch.chdir(tmp_path)
    for name in (
        "b.py", "a.py", "n.ipynb", "ds.json", "c.yaml", "notes.txt", "sub/deep/x.py", "sub/y.yml", ".hidden/h.py",
        ".venv/v.py", "node_modules/n.json", "__pycache__/p.py", "build/o.py", "pkg.egg-info/e.py", "myenv/pyvenv.cfg",
        "myenv/lib/z.py",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def paths(*arguments):
    return [target.path for target in find_files(arguments)]


def test_a_folder_is_searched_in_order(tree):
    """Files are selected by suffix and sorted, without environments, caches, builds and hidden folders."""
    assert paths(".") == ["a.py", "b.py", "c.yaml", "ds.json", "n.ipynb", "sub/y.yml", "sub/deep/x.py"]
    assert paths(str(tree / "sub")) == [str(tree / "sub" / "y.yml"), str(tree / "sub" / "deep" / "x.py")]


def test_a_named_file_is_checked_wherever_it_is(tree):
    """A file that the user names is never skipped or excluded."""
    (tree / "pyproject.toml").write_text("[tool.halfstep.check]\nexclude = ['a.py', 'sub']\n")
    assert paths("build/o.py", ".hidden/h.py", "a.py") == ["build/o.py", ".hidden/h.py", "a.py"]
    assert all(target.named for target in find_files(["a.py"]))
    assert paths(".") == ["b.py", "c.yaml", "ds.json", "n.ipynb"]


def test_each_file_is_checked_once(tree):
    """A file that is named and also inside a named folder is checked once."""
    assert paths("a.py", ".", "a.py").count("a.py") == 1


def test_a_script_without_an_ending_is_known_by_its_first_line(tree):
    """A shebang line that names Python makes it a Python file."""
    (tree / "train").write_text("#!/usr/bin/env python3\nx = 1\n")
    (target,) = find_files(["train"])
    assert target.language == "python"


@pytest.mark.parametrize(
    ("name", "words"),
    [("gone.py", "no file or folder"), ("notes.txt", "cannot be checked"), ("a\0.py", "no file"), ("", "no file")],
)
def test_what_cannot_be_checked_is_rejected_by_name(tree, name, words):
    """The message has the name and what to do."""
    with pytest.raises(SettingError, match=words):
        find_files([name])


def test_links_are_not_followed_in_circles(tree):
    """A link to a parent folder does not make the walk endless; a broken link is not a file."""
    (tree / "sub" / "loop").symlink_to(tree)
    (tree / "sub" / "broken.py").symlink_to(tree / "gone")
    assert "sub/broken.py" not in paths(".")
    assert len(paths(".")) == 7
    assert paths("sub/broken.py") == ["sub/broken.py"]
