"""Saving in the background: what is written, who waits for it, and where its errors appear."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.saver import Saver
from halfstep.errors import HalfstepError, SettingError


@pytest.fixture
def gate(monkeypatch):
    """An event without which no background thread syncs a file."""
    opened, real = threading.Event(), os.fsync

    def wait(handle):
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(60)
        real(handle)

    monkeypatch.setattr(os, "fsync", wait)
    yield opened
    opened.set()


def save(saver, path, value=1.0, **options):
    """Save a small checkpoint in the background and return the tensor that is in it."""
    tensor = torch.full((4, 3), value)
    arguments = {"weights": {"w": tensor}, "state": {"t": tensor.t()}, "own": {"n": value}, "meta": {}}
    saver.save(path, **arguments, **{"wait": False} | options)
    return tensor


def test_changes_after_the_call_are_not_saved(tmp_path, gate):
    """The copy has the values at the time of the call, of tensors that are not contiguous too."""
    saver = Saver()
    tensor = save(saver, tmp_path / "a")
    tensor.zero_()
    assert saver.busy
    assert not (tmp_path / "a").exists()
    gate.set()
    saver.finish()
    assert not saver.busy
    loaded = load_checkpoint(tmp_path / "a")
    assert bool((loaded.weights["w"] == 1).all())
    assert loaded.state["t"].shape == (3, 4)
    assert bool((loaded.state["t"] == 1).all())
    assert loaded.state["n"] == 1.0


def test_the_next_save_waits_for_the_one_before(tmp_path, gate):
    """The buffers are in use until then; one save after the other is written, and `then` is called once it is in place."""
    saver, places = Saver(), []
    save(saver, tmp_path / "a", 1.0, then=lambda: places.append((tmp_path / "a").exists()))
    threading.Timer(0.05, gate.set).start()
    save(saver, tmp_path / "b", 2.0)
    assert places == [True]
    saver.finish()
    assert [load_checkpoint(tmp_path / name).weights["w"][0, 0].item() for name in "ab"] == [1.0, 2.0]


def test_an_error_of_the_thread_is_raised_by_the_next_call_once(tmp_path, monkeypatch, caplog):
    """By a save, which then writes nothing, or by finish; it is logged when it happens."""
    saver = Saver()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            save(saver, tmp_path / "full")
            saver._thread.join()
        with pytest.raises(HalfstepError, match="No space left on device"):
            save(saver, tmp_path / "next")
        assert list(tmp_path.iterdir()) == []
        saver.finish()
    assert "full was not saved" in caplog.text
    save(saver, tmp_path / "next")
    saver.finish()
    load_checkpoint(tmp_path / "next")


def test_what_can_be_known_at_once_is_raised_at_once(tmp_path):
    """A path that is in use and a value that cannot be stored do not wait for the thread."""
    saver = Saver()
    save(saver, tmp_path / "a", wait=True)
    with pytest.raises(SettingError, match="exists already"):
        save(saver, tmp_path / "a")
    with pytest.raises(SettingError, match="cannot store"):
        saver.save(tmp_path / "b", weights={}, state={"a": object()}, own={}, meta={}, wait=False)
    assert not saver.busy
    save(saver, tmp_path / "a", 2.0, overwrite=True)
    saver.finish()
    assert load_checkpoint(tmp_path / "a").weights["w"][0, 0] == 2


@pytest.mark.slow
def test_a_program_that_ends_without_finishing_completes_its_save(tmp_path):
    """The thread is not a daemon."""
    program = f"""
        import torch
        from halfstep.checkpoint.saver import Saver
        Saver().save({str(tmp_path / "last")!r}, weights={{"w": torch.ones(3)}}, state={{}}, own={{}}, meta={{}}, wait=False)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    assert load_checkpoint(tmp_path / "last").weights["w"].tolist() == [1, 1, 1]
