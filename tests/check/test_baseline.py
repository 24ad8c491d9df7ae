"""A baseline: known findings are left out, new ones are not."""

import json

import pytest

from check_toys import use_toys
from halfstep.check.baseline import read_baseline, subtract, write_baseline
from halfstep.check.options import Options
from halfstep.check.project import find_project
from halfstep.check.session import check_paths
from halfstep.errors import HalfstepError, SettingError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Toy rules, and a current folder with one file and its baseline."""
    use_toys(monkeypatch)
    find_project.cache_clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("BAD; x = 1\nHMM\n")
    assert write_baseline(tmp_path / "base.json", results()) == 2
    return tmp_path


def results(*paths):
    return check_paths(paths or ["."], Options()).results


def new(folder, *paths):
    left = subtract(results(*paths), read_baseline(folder / "base.json"))
    return [(f.code, f.line) for result in left for f in result.findings]


def test_known_findings_are_left_out(folder):
    """Files without others are left out entirely."""
    assert new(folder) == []
    assert subtract(results(), read_baseline(folder / "base.json")) == ()


def test_a_finding_that_moved_is_still_known(folder):
    """To another line or indentation."""
    (folder / "a.py").write_text("import torch\n\nHMM\nif torch:\n    BAD;  x = 1\n")
    assert new(folder) == []


def test_a_new_finding_is_reported(folder):
    """On another line, of another rule on the same line, a second time, or in another file."""
    (folder / "a.py").write_text("BAD; x = 1\nHMM\nBAD; y = 2\n")
    assert new(folder) == [("HS901", 3)]
    (folder / "a.py").write_text("BAD; x = 1\nHMM\nBAD; x = 1\n")
    assert new(folder) == [("HS901", 3)]
    (folder / "b.py").write_text("HMM\n")
    assert new(folder, "b.py") == [("HS902", 1)]


def test_paths_are_relative_to_the_baseline(folder, monkeypatch):
    """The check may run in another folder, or name the file in another way."""
    assert list(json.loads((folder / "base.json").read_text())["findings"]) == ["a.py"]
    assert new(folder, str(folder / "a.py")) == []
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    assert new(folder, "../a.py") == []


def test_the_file_is_stable(folder):
    """Writing it again changes no byte."""
    before = (folder / "base.json").read_bytes()
    write_baseline(folder / "base.json", reversed(results()))
    assert (folder / "base.json").read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "findings": {}}',
        '{"version": 1, "findings": {"a": 1}}',
        "\0",
        '{"version": 1, "findings": {"a": {"b": {"c": "d"}}}}',
    ],
)
def test_a_file_that_is_no_baseline_is_rejected_by_name(folder, text):
    """With what to do."""
    (folder / "base.json").write_text(text)
    with pytest.raises(SettingError, match=r"base\.json.*--write-baseline"):
        read_baseline(folder / "base.json")


def test_a_missing_baseline_is_an_error(folder):
    """A misspelt name must not report everything, or nothing."""
    with pytest.raises(SettingError, match="No such file"):
        read_baseline(folder / "gone.json")


def test_a_baseline_that_cannot_be_written_is_one_error(folder):
    """In a folder that does not exist."""
    with pytest.raises(HalfstepError, match="Cannot write the baseline"):
        write_baseline(folder / "gone" / "base.json", results())
