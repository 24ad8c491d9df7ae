"""A child process and the conversation with it."""

import os

import pytest

from halfstep.comparison import process
from halfstep.comparison.process import INSIDE, ChildProcess, Stopped
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import ChildSpec


def test_a_child_dies_with_its_parent(tmp_path, monkeypatch):
    """When the pipe closes there is nobody to report to, and it ends by itself."""
    monkeypatch.setattr(process, "_PATIENCE_SECONDS", 120)
    child = ChildProcess(ChildSpec("digits", None, {}), tmp_path, "x", lambda: False)
    child.close()
    assert child._process.returncode == 1
    child.close()


def test_waiting_ends_when_asked_to_stop(tmp_path):
    """A stop is noticed while a child works, and the child is ended."""
    child = ChildProcess(ChildSpec("digits", None, CompareSettings().as_dict()), tmp_path, "x", lambda: True)
    with pytest.raises(Stopped):
        child.ask(do="survey")
    child.close()
    assert child._process.poll() is not None


def test_the_environment_of_the_parent_is_left_alone():
    """The mark of a child is set in children only."""
    assert INSIDE not in os.environ
