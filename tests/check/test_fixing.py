"""Fixes: applied together where possible, verified on the changed file, written atomically."""

import os
import stat

import pytest

from check_toys import use_toys
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.fixing import fix_document, write_back
from halfstep.check.runner import check_document
from halfstep.check.select import Selection


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Toy rules throughout."""
    use_toys(monkeypatch)


def check(document):
    return check_document(document, Settings(), Selection())


def fix(data, path="a.py", language="python"):
    document = read_document(str(path), data, language)
    return fix_document(document, check(document), check)


def test_all_that_can_be_fixed_is_and_nothing_else():
    """Every BAD is fixed, every other byte stays: the encoding, mixed line endings, the missing last newline."""
    data = b"# coding: latin-1\r\nBAD ; x = '\xe9'\nHMM\r\nBAD"
    done = fix(data)
    assert done.after.data == data.replace(b"BAD", b"FINE")
    assert [f.code for f in done.findings] == ["HS902"]
    assert len(done.applied) == 2


def test_fixes_that_lead_to_others_continue_until_nothing_is_left():
    """Fixing repeats in rounds, up to a limit."""
    done = fix(b"CHAIN\nCHAIN")
    assert done.after.data == b"END\nEND"
    assert done.findings == ()
    assert [f.code for f in done.applied] == ["HS906", "HS906", "HS907", "HS907"]


@pytest.mark.parametrize("word", [b"BREAK", b"WORSE"])
def test_a_fix_that_fails_verification_is_skipped(word):
    """A fix whose result does not parse or has a new error is rejected; the other fixes are applied."""
    done = fix(b"BAD\n" + word + b"\nCHAIN")
    assert done.after.data == b"FINE\n" + word + b"\nEND"
    assert len(done.findings) == 1


def test_a_suppressed_finding_is_not_fixed():
    """Code that the user marked with a comment does not change."""
    data = b"BAD  # halfstep: ignore[HS901] on purpose\n"
    assert fix(data).after.data == data


def test_a_notebook_is_fixed_inside_its_cells():
    """The JSON around the cells does not change."""
    data = b'{"cells": [\n {"cell_type": "code",  "source": ["x = 1\\n", "BAD\\n", "!ls"]}],\n "nbformat": 4}'
    done = fix(data, "a.ipynb", "notebook")
    assert done.after.data == data.replace(b"BAD", b"FINE")


def written(path, data):
    path.write_bytes(data)
    return fix(data, path)


def test_a_file_is_replaced_with_its_mode(tmp_path):
    """The file has the new content and the old permissions, and no temporary file remains."""
    path = tmp_path / "a.py"
    done = written(path, b"BAD\n")
    path.chmod(0o751)
    assert write_back(done) == ""
    assert path.read_bytes() == b"FINE\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert [p.name for p in tmp_path.iterdir()] == ["a.py"]


def test_a_file_that_changed_meanwhile_is_not_overwritten(tmp_path):
    """A file saved between reading and writing keeps its new content."""
    done = written(tmp_path / "a.py", b"BAD\n")
    (tmp_path / "a.py").write_bytes(b"newer\n")
    assert "changed" in write_back(done)
    assert (tmp_path / "a.py").read_bytes() == b"newer\n"


def test_links_deleted_and_read_only_files_are_not_written(tmp_path):
    """Each gives its reason instead of a traceback."""
    real = tmp_path / "real.py"
    real.write_bytes(b"BAD\n")
    (tmp_path / "link.py").symlink_to(real)
    assert "link" in write_back(fix(b"BAD\n", tmp_path / "link.py"))
    assert "No such file" in write_back(fix(b"BAD\n", tmp_path / "gone.py"))
    real.chmod(0o444)
    assert "read-only" in write_back(fix(b"BAD\n", real))
    assert real.read_bytes() == b"BAD\n"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    """Writing is atomic, and the temporary file is removed."""
    done = written(tmp_path / "a.py", b"BAD\n")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert write_back(done) == "No space left on device"
    assert (tmp_path / "a.py").read_bytes() == b"BAD\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.py"]
