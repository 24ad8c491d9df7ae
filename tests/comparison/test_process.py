"""A child process and the conversation with it."""

import contextlib
import os
import signal

import pytest

from comparison_jobs import write_job
from halfstep.comparison import process
from halfstep.comparison.process import INSIDE, ChildProcess, Stopped
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import ChildSpec


def test_a_child_dies_with_its_parent(tmp_path, monkeypatch):
    """When the pipe closes there is nobody to report to, and it ends by itself."""
    monkeypatch.setattr(process, "_PATIENCE_SECONDS", 600)
    child = ChildProcess(ChildSpec("digits", None, CompareSettings()), tmp_path, "x", lambda: False)
    child.close()
    assert child._process.returncode == 1
    child.close()


def test_waiting_ends_when_asked_to_stop(tmp_path):
    """A stop is noticed while a child works, and the child is ended."""
    child = ChildProcess(ChildSpec("digits", None, CompareSettings()), tmp_path, "x", lambda: True)
    with pytest.raises(Stopped):
        child.ask(do="survey")
    child.close()
    assert child._process.poll() is not None


def ask_job(tmp_path, code):
    """The answer to a survey of a job file that begins with this code."""
    path = write_job(tmp_path)
    path.write_text(f"import os, subprocess, time\n{code}\n{path.read_text()}")
    child = ChildProcess(ChildSpec(str(path), None, CompareSettings()), tmp_path, "x", lambda: False)
    with contextlib.closing(child):
        return child.ask(do="survey")


def test_a_job_does_not_read_the_requests(tmp_path):
    """Its stdin, and that of the programs it starts, is empty."""
    code = "assert subprocess.run(['cat'], stdout=subprocess.PIPE).stdout == b''\ninput('go on?')"
    answer = ask_job(tmp_path, code)
    assert "EOFError" in answer.failure.reason


def test_a_death_is_noticed_though_a_grandchild_lives(tmp_path):
    """A process that the job forked keeps the pipe open, and the answer does not wait for its end."""
    note = tmp_path / "grandchild"
    job = f"pid = os.fork()\nif pid == 0: time.sleep(3600)\nopen({str(note)!r}, 'w').write(str(pid))\nos._exit(7)"
    answer = ask_job(tmp_path, job)
    assert "exited with code 7" in answer.failure.reason
    os.kill(int(note.read_text()), signal.SIGKILL)  # raises where it had already ended


def test_the_environment_of_the_parent_is_left_alone():
    """The mark of a child is set in children only."""
    assert INSIDE not in os.environ
