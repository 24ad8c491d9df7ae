"""Signals request a stop, and only a further one ends the process."""

import os
import signal

import pytest

from halfstep.train.stop import StopRequest


@pytest.fixture
def usual_handlers():
    """Ctrl-C raises KeyboardInterrupt, also in a process that a shell started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_handlers")
@pytest.mark.parametrize(("saves", "patience"), [(False, 1), (True, 2)])
def test_a_further_signal_has_its_usual_effect(saves, patience):
    """The second one, or the third where the first asked for a checkpoint."""
    with StopRequest(saves=saves) as stop:
        assert not stop
        for _ in range(patience):
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_first_signal_names_the_stop(caplog):
    """SIGINT after SIGTERM does not change the exit code, and the user reads what a further one does."""
    with StopRequest(saves=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert caplog.text == ""
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal is signal.SIGTERM
    assert "Once more exits" in caplog.text


def test_handlers_are_restored():
    """After the block, signals do what they did before it."""
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(saves=True):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
