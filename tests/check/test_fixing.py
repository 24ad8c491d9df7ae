"""Fixes: made together where they can be, proven on the changed file, written whole or not at all."""

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
    """Every BAD goes, every other byte stays: the encoding, the odd line endings, the missing last newline."""
    data = b"# coding: latin-1\r\nBAD ; x = '\xe9'\nHMM\r\nBAD"
    done = fix(data)
    assert done.after.data == data.replace(b"BAD", b"FINE")
    assert [f.code for f in done.findings] == ["HS902"]
    assert len(done.applied) == 2


def test_fixes_that_uncover_others_go_on_until_nothing_is_left():
    """Round after round, up to a bound."""
    done = fix(b"CHAIN\nCHAIN")
    assert done.after.data == b"END\nEND"
    assert done.findings == ()
    assert [f.code for f in done.applied] == ["HS906", "HS906", "HS907", "HS907"]


@pytest.mark.parametrize("word", [b"BREAK", b"WORSE"])
def test_a_fix_that_does_not_hold_up_is_left_out(word):
    """One that does not parse or brings a new error is refused; its neighbours are made."""
    done = fix(b"BAD\n" + word + b"\nCHAIN")
    assert done.after.data == b"FINE\n" + word + b"\nEND"
    assert len(done.findings) == 1


def test_a_silenced_finding_is_not_fixed():
    """What the user chose to keep is kept."""
    data = b"BAD  # halfstep: ignore[HS901] on purpose\n"
    assert fix(data).after.data == data


def test_a_notebook_is_fixed_inside_its_cells():
    """The JSON around the cells is as it was."""
    data = b'{"cells": [\n {"cell_type": "code",  "source": ["x = 1\\n", "BAD\\n", "!ls"]}],\n "nbformat": 4}'
    done = fix(data, "a.ipynb", "notebook")
    assert done.after.data == data.replace(b"BAD", b"FINE")


def written(path, data):
    path.write_bytes(data)
    return fix(data, path)


def test_a_file_is_replaced_with_its_mode(tmp_path):
    """The new content, the old permissions, no leftovers."""
    path = tmp_path / "a.py"
    done = written(path, b"BAD\n")
    path.chmod(0o751)
    assert write_back(done) == ""
    assert path.read_bytes() == b"FINE\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert [p.name for p in tmp_path.iterdir()] == ["a.py"]


def test_a_file_that_changed_meanwhile_is_left_alone(tmp_path):
    """Somebody saved it between reading and writing."""
    done = written(tmp_path / "a.py", b"BAD\n")
    (tmp_path / "a.py").write_bytes(b"newer\n")
    assert "changed" in write_back(done)
    assert (tmp_path / "a.py").read_bytes() == b"newer\n"


def test_links_vanished_and_read_only_files_are_left_alone(tmp_path):
    """Each with its reason, none with a traceback."""
    real = tmp_path / "real.py"
    real.write_bytes(b"BAD\n")
    (tmp_path / "link.py").symlink_to(real)
    assert "link" in write_back(fix(b"BAD\n", tmp_path / "link.py"))
    assert "No such file" in write_back(fix(b"BAD\n", tmp_path / "gone.py"))
    real.chmod(0o444)
    assert "read-only" in write_back(fix(b"BAD\n", real))
    assert real.read_bytes() == b"BAD\n"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    """Whole or not at all, and the spare file is gone."""
    done = written(tmp_path / "a.py", b"BAD\n")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert write_back(done) == "No space left on device"
    assert (tmp_path / "a.py").read_bytes() == b"BAD\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.py"]
