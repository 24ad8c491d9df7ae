"""What the user's code raises, as one message with the user's own line."""

import pytest
import torch

from halfstep.errors import SettingError
from halfstep.jobs.failures import JobError, JobGuard, error_text, is_out_of_memory, user_line


def guarded(error):
    """Raise an error inside a guard."""
    with JobGuard(lambda: "The loss"):
        raise error


def recurse():
    return recurse()


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("val"), OSError(28, "full"), AssertionError("no")])
def test_an_exception_becomes_a_job_error_with_its_line(error):
    """The message has the part, the line and the error; the original is the cause."""
    with pytest.raises(JobError, match=r"The loss failed at .*test_failures.py:\d+: \w+Error: ") as caught:
        guarded(error)
    assert caught.value.__cause__ is error


def test_sys_exit_does_not_end_the_command():
    """Its code would be taken for the command's own."""
    with pytest.raises(JobError, match=r"The loss called sys.exit\(3\) at .*test_failures.py"):
        guarded(SystemExit(3))


def test_endless_recursion_is_an_error_like_any_other():
    """One message instead of a thousand frames."""
    with pytest.raises(JobError, match="RecursionError"), JobGuard(lambda: "The loss"):
        recurse()


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA"), SettingError("ours"), KeyboardInterrupt(), StopIteration()]
)
def test_some_exceptions_pass_unchanged(error):
    """What a caller has to recognize, and what already has a remedy."""
    with pytest.raises(type(error)) as caught:
        guarded(error)
    assert caught.value is error


def test_only_exhausted_memory_is_out_of_memory():
    """Of the host or of a GPU."""
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error"))


def test_cpp_frames_are_removed_from_a_message():
    """torch appends its own stack to some messages."""
    error = RuntimeError(
        "could not multiply\nException raised from mm at mm.cpp:3 (most recent call first):\nframe #0: f"
    )
    assert error_text(error) == "RuntimeError: could not multiply"


def test_the_line_of_an_error_without_a_traceback_is_unknown():
    """An exception that was never raised has no line."""
    assert user_line(ValueError("never raised")) == ""
