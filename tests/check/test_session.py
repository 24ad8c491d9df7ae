"""A complete check through the library."""

import pytest

from check_toys import use_toys
from halfstep.check import check_path
from halfstep.check.options import Options
from halfstep.check.project import find_project
from halfstep.check.session import check_paths, check_stdin
from halfstep.errors import SettingError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Toy rules, and a current folder with two files."""
    use_toys(monkeypatch)
    find_project.cache_clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("BAD\nHMM\n")
    (tmp_path / "b.py").write_text("BAD\n")
    return tmp_path


def test_check_path_takes_one_path_or_several(folder):
    """A string, a Path, a folder and a list are accepted."""
    assert [f.code for f in check_path("a.py")] == ["HS901", "HS902"]
    assert check_path(folder / "a.py") == tuple(
        f.__class__(**{**f.__dict__, "path": str(folder / "a.py")}) for f in check_path("a.py")
    )
    assert len(check_path(".")) == len(check_path(["a.py", "b.py"])) == 3


def test_check_path_selects_and_ignores(folder):
    """`select` and `ignore` accept a list of selectors or one string."""
    assert [f.code for f in check_path("a.py", select="HS902")] == ["HS902"]
    assert [f.code for f in check_path("a.py", ignore=["advice"])] == ["HS901"]
    with pytest.raises(SettingError, match="no rule is called"):
        check_path("a.py", select=["HS555"])


def test_the_project_of_the_path_applies(folder):
    """Its ignores apply, for all files and per file."""
    text = "[tool.halfstep.check]\nignore = ['HS902']\nper-file-ignores = { 'b.py' = ['HS9'] }\n"
    (folder / "pyproject.toml").write_text(text)
    assert [(f.path, f.code) for f in check_path(".")] == [("a.py", "HS901")]


def test_fixes_are_written_only_on_request(folder):
    """`fix` alone changes nothing on disk."""
    shown = check_paths(["."], Options(), fix=True)
    assert [(f.path, f.after.raw) for f in shown.fixed] == [("a.py", "FINE\nHMM\n"), ("b.py", "FINE\n")]
    assert (folder / "a.py").read_text() == "BAD\nHMM\n"
    done = check_paths(["."], Options(), fix=True, write=True)
    assert (folder / "a.py").read_text() == "FINE\nHMM\n"
    assert [f.code for f in done.findings] == ["HS902"]
    assert check_paths(["."], Options(), fix=True, write=True).fixed == ()


def test_a_file_that_cannot_be_written_keeps_its_findings(folder):
    """The outcome has the reason and the remaining findings."""
    (folder / "link.py").symlink_to(folder / "a.py")
    outcome = check_paths(["link.py"], Options(), fix=True, write=True)
    assert "link" in outcome.fixed[0].problem
    assert [f.code for f in outcome.findings] == ["HS901", "HS902"]


def test_standard_input_is_checked_under_its_name():
    """The name determines language and project."""
    assert [f.path for f in check_stdin(b"BAD", "x/y.py", Options()).findings] == ["x/y.py"]
    assert check_stdin(b"BAD", "y.py", Options(), fix=True).fixed[0].after.data == b"FINE"
    with pytest.raises(SettingError, match="--stdin-filename"):
        check_stdin(b"BAD", "y.txt", Options())
