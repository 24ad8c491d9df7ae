"""Many files over several processes, in order and within their time."""

import signal

import pytest

from check_toys import use_toys
from halfstep.check import parallel
from halfstep.check.options import Options
from halfstep.check.parallel import check_targets
from halfstep.check.project import Project
from halfstep.check.walk import Target
from halfstep.errors import HalfstepError


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Toy rules throughout, in forked workers too."""
    use_toys(monkeypatch)


@pytest.fixture
def targets(tmp_path):
    """A hundred files, every tenth with a finding."""
    paths = []
    for i in range(100):
        path = tmp_path / f"{i:03}.py"
        path.write_text("BAD\n" if i % 10 == 0 else "x = 1\n")
        paths.append(Target(str(path), "python", Project(), named=True))
    return paths


@pytest.mark.skipif("fork" not in __import__("multiprocessing").get_all_start_methods(), reason="Requires: [fork]")
def test_processes_give_the_same_results_in_the_same_order(targets, monkeypatch):
    """Whether here or in workers."""
    here = list(check_targets(targets, Options()))
    monkeypatch.setattr(parallel, "_num_cores", lambda: 2)
    monkeypatch.setattr(parallel.threading, "active_count", lambda: 1)
    started = []
    original = parallel._check_in_processes
    monkeypatch.setattr(parallel, "_check_in_processes", lambda *args: started.append(1) or original(*args))
    there = list(check_targets(targets, Options(), limit=True))
    assert there == here
    assert started
    assert sum(len(result.findings) for result in here) == 10


def test_few_files_start_no_process(targets, monkeypatch):
    """A worker costs more than a few files."""
    monkeypatch.setattr(parallel, "_check_in_processes", None)
    assert len(list(check_targets(targets[:20], Options(), limit=True))) == 20


def test_a_file_that_takes_too_long_is_given_up(targets, monkeypatch):
    """One finding, and the next file is checked; the alarm is as it was before."""
    before = signal.getsignal(signal.SIGPROF)
    original = parallel.check_target

    def slow(target, options):
        if target.path.endswith("001.py"):
            assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
            signal.setitimer(signal.ITIMER_PROF, 0.001)  # as if nearly all of its time had passed
            while True:
                pass
        return original(target, options)

    monkeypatch.setattr(parallel, "check_target", slow)
    results = list(check_targets(targets[:3], Options(), limit=True))
    assert [[f.code for f in result.findings] for result in results] == [["HS901"], ["HS005"], []]
    assert signal.getsignal(signal.SIGPROF) == before


@pytest.mark.skipif("fork" not in __import__("multiprocessing").get_all_start_methods(), reason="Requires: [fork]")
def test_a_worker_that_dies_is_an_error_with_a_way_out(targets, monkeypatch):
    """Not a hang, and not a traceback."""
    monkeypatch.setattr(parallel, "_num_cores", lambda: 2)
    monkeypatch.setattr(parallel.threading, "active_count", lambda: 1)
    monkeypatch.setattr(parallel, "check_target", lambda target, options: __import__("os")._exit(1))
    with pytest.raises(HalfstepError, match="worker process died"):
        list(check_targets(targets, Options(), limit=True))


@pytest.mark.parametrize("limit", [False, True])
def test_garbage_collection_is_as_before_afterwards(targets, limit):
    """The command collects rarely while it checks in its own process; a library call leaves the setting alone."""
    before = parallel.gc.get_threshold()
    results = check_targets(targets[:2], Options(), limit=limit)
    next(results)
    during = parallel.gc.get_threshold()
    list(results)
    assert (during != before) is limit
    assert parallel.gc.get_threshold() == before
