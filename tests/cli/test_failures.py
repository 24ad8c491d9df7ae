"""Errors that are not Halfstep's own, at the command line."""

import errno

import pytest
import torch

from halfstep.cli import main
from halfstep.cli.failures import explain_error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "Out of main memory"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate"),
            "Out of GPU memory: CUDA out of memory. Tried. Pass",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/run"),
            "/data/run cannot be read or written: No space left",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "a"), "a cannot be read or written: Permission denied"),
        (RecursionError("maximum recursion depth exceeded"), "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_a_known_error_has_a_remedy(error, message):
    """One message instead of a traceback."""
    assert str(explain_error(error)).startswith(message)


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), RuntimeError("a bug"), OSError("odd")])
def test_other_errors_pass_unchanged(error):
    """A closed pipe is handled by the command line, and a bug must be visible."""
    assert explain_error(error) is None


@pytest.mark.parametrize(
    ("error", "code"), [(MemoryError(), 1), (OSError(errno.ENOSPC, "full"), 1), (KeyboardInterrupt(), 130)]
)
def test_every_command_ends_with_a_message_and_a_code(error, code, monkeypatch, capsys):
    """Whatever a command raises while it runs."""

    def fail(*_):
        raise error

    monkeypatch.setattr("halfstep.cli.probe.probe", fail)
    with pytest.raises(SystemExit) as caught:
        main(["probe"])
    assert caught.value.code == code
    text = capsys.readouterr().err
    assert text.startswith("halfstep: ")
    assert "Traceback" not in text


def test_torchrun_gets_the_message_of_our_errors_without_a_traceback(tmp_path, monkeypatch):
    """Its summary prints what it gets; an unexpected error keeps its traceback."""
    import json

    from halfstep.cli.failures import report_to_launcher
    from halfstep.errors import SettingError

    def fail(kind):
        raise kind("lower the batch")

    texts = {}
    for kind in (SettingError, ValueError):
        file = tmp_path / f"{kind.__name__}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        try:
            fail(kind)
        except kind as error:
            report_to_launcher(error)
        texts[kind] = json.dumps(json.loads(file.read_text()))
    assert all("lower the batch" in text for text in texts.values())
    assert "Traceback" not in texts[SettingError]
    assert "Traceback" in texts[ValueError]
