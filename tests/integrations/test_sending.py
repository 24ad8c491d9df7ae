"""The thread that sends what a run logs."""

import threading

import pytest

from halfstep.integrations.sending import Sender


def test_tasks_run_in_order_and_close_waits_for_them():
    """None is lost, though the first waits until all are submitted."""
    sender, done, gate = Sender("test"), [], threading.Event()
    sender.submit(gate.wait)
    for i in range(100):
        sender.submit(lambda i=i: done.append(i))
    assert done == []
    gate.set()
    sender.close()
    assert done == list(range(100))


def test_what_a_task_raises_reaches_the_next_call_and_ends_the_rest():
    """The tasks behind it do not run."""
    sender, done, gate = Sender("test"), [], threading.Event()

    def fail():
        gate.wait()
        raise ConnectionError("no route to host.")

    sender.submit(fail)
    sender.submit(lambda: done.append(1))
    gate.set()
    with pytest.raises(ConnectionError, match="no route to host"):
        sender.close()
    with pytest.raises(ConnectionError, match="no route to host"):
        sender.submit(lambda: done.append(2))
    assert done == []
