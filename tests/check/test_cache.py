"""The cache: the same findings as without it, and never a reason to fail."""

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from check_toys import use_toys
from halfstep.check import cache as cache_module
from halfstep.check import session
from halfstep.check.cache import default_folder, open_cache
from halfstep.check.options import Options
from halfstep.check.pins import pins_in_folder
from halfstep.check.project import find_project
from halfstep.check.session import check_paths


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Toy rules, and a current folder with three files."""
    use_toys(monkeypatch)
    find_project.cache_clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("BAD\nHMM\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["BAD\n"]}]}))
    return tmp_path


def run(options=None, where="cache"):
    """One check with a cache: its outcome, and how many results came from the cache."""
    cache = open_cache(Path(where), options or Options())
    outcome = check_paths(["."], options or Options(), cache=cache)
    return outcome, cache.num_hits


def test_a_second_run_finds_every_result_and_reports_the_same(folder):
    """Findings with their fixes, the source lines for reports, and the count of files."""
    first, hits = run()
    assert hits == 0
    second, hits = run()
    assert (hits, second) == (3, first)
    assert second == check_paths(["."], Options())
    assert len(second.findings) == 3


def test_nothing_is_analysed_again(folder, monkeypatch):
    """The point of the cache."""
    run()
    monkeypatch.setattr(session, "check_targets", lambda targets, options, *, limit: iter([None] * len(targets)))
    assert run()[1] == 3


def test_a_changed_file_is_checked_again(folder):
    """Also if its size and time of change are the same."""
    run()
    state = (folder / "b.py").stat()
    (folder / "b.py").write_text("BAD  \n")
    os.utime("b.py", ns=(state.st_atime_ns, state.st_mtime_ns))
    outcome, hits = run()
    assert (hits, len(outcome.findings)) == (2, 4)


@pytest.mark.parametrize(
    "options",
    [
        Options(select=("HS902",)),
        Options(ignore=("HS902",)),
        Options(deepspeed="0.16.4"),
        Options(preview=True),
        Options(gpu="A100"),
    ],
)
def test_other_options_have_other_results(folder, options):
    """And they do not replace each other's."""
    run()
    outcome, hits = run(options)
    assert hits == 0
    assert outcome == check_paths(["."], options)
    assert run()[1] == run(options)[1] == 3


def test_the_projects_settings_count(folder):
    """A change of pyproject.toml gives other results."""
    run()
    (folder / "pyproject.toml").write_text("[tool.halfstep.check.per-file-ignores]\n'a.py' = ['HS901']\n")
    find_project.cache_clear()
    outcome, hits = run()
    assert (hits, [f.code for f in outcome.findings]) == (2, ["HS902", "HS901"])


def test_another_version_has_other_results(folder, monkeypatch):
    """Of Halfstep, and of its own files."""
    run()
    cache_module._fingerprint.cache_clear()
    monkeypatch.setattr(cache_module, "__version__", "9.9.9")
    assert run()[1] == 0
    cache_module._fingerprint.cache_clear()


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, b"not a digest\n{}", None, "truncate", "flip"])
def test_a_damaged_cache_is_ignored_and_replaced(folder, damage):
    """Whatever happened to the file."""
    expected, _ = run()
    (file,) = (folder / "cache").glob("check-*.json")
    data = file.read_bytes()
    if damage is None:
        file.unlink()
        file.mkdir()
    elif damage == "truncate":
        file.write_bytes(data[:-10])
    elif damage == "flip":
        file.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    else:
        file.write_bytes(damage)
    assert run() == (expected, 0)
    if damage is not None:
        assert run() == (expected, 3)


def test_a_folder_that_cannot_be_written_changes_nothing(folder):
    """The check runs without a cache."""
    (folder / "file").write_text("")
    outcome, hits = run(where="file/cache")
    assert (hits, len(outcome.findings)) == (0, 3)


def test_runs_at_the_same_time_leave_a_valid_cache(folder):
    """No run fails or reads half a file."""
    expected, _ = run(where="other")
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: run()[0], range(24)))
    assert all(outcome == expected for outcome in outcomes)
    assert run() == (expected, 3)
    assert not [
        p.name for p in (folder / "cache").iterdir() if not p.name.startswith(("check-", ".gitignore", "CACHEDIR"))
    ]
    assert all(p.name.endswith(".json") for p in (folder / "cache").glob("check-*"))


def test_the_folder_is_kept_out_of_version_control(folder):
    """It has its own .gitignore and tag, as caches of other tools do."""
    run()
    assert (folder / "cache/.gitignore").read_text() == "*\n"
    assert (folder / "cache/CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_a_script_is_checked_again_when_a_file_it_names_changes(folder):
    """Its findings depend on the configuration it runs with."""
    (folder / "b.py").write_text("import deepspeed\nconfig = 'ds.json'\n")
    run()
    assert run()[1] == 3
    (folder / "ds.json").write_text("{}")
    assert run()[1] == 2  # the script and the new file
    assert run()[1] == 4
    (folder / "ds.json").write_text('{"a": 1}')
    assert run()[1] == 2
    (folder / "ds.json").unlink()
    assert run()[1] == 2


def test_a_changed_requirement_is_checked_again(folder):
    """Findings about library versions depend on the pins next to a file."""
    (folder / "requirements.txt").write_text("torch==2.11.0\n")
    run()
    (folder / "requirements.txt").write_text("torch==2.12.0\n")
    for function in (pins_in_folder, cache_module._pins):
        function.cache_clear()  # as in the next process
    assert run()[1] == 0


def test_entries_of_deleted_files_are_removed(folder):
    """So that the cache does not grow for ever."""
    run()
    (folder / "b.py").unlink()
    (folder / "c.py").write_text("x = 2\n")
    run()
    (file,) = (folder / "cache").glob("check-*.json")
    assert b"b.py" not in file.read_bytes()


def test_every_field_of_a_finding_is_stored(folder):
    """A new field must not get lost in the cache."""
    outcome, _ = run()
    again, _ = run()
    for before, after in zip(outcome.findings, again.findings, strict=True):
        assert dataclasses.asdict(before) == dataclasses.asdict(after)


def test_the_default_folder_is_in_the_project_or_the_users_cache(tmp_path, monkeypatch):
    """Next to pyproject.toml or .git; a folder outside projects stays clean."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    inner = tmp_path / "project" / "src"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert default_folder() == tmp_path / "xdg" / "halfstep"
    (tmp_path / "project" / "pyproject.toml").write_text("")
    assert default_folder() == tmp_path / "project" / ".halfstep_cache"
