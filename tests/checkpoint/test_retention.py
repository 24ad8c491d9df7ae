import errno
import json
import logging
import math
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_crashes import held
from halfstep.checkpoint.atomic import folder_lock
from halfstep.checkpoint.directory import load_checkpoint, save_checkpoint
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.errors import HalfstepError, SettingError

PROGRAM = Path(__file__).parents[1] / "checkpoint_crashes.py"


def save(folder, step, metric=None, **options):
    """Save a small checkpoint of that step."""
    weights = {"w": torch.tensor([float(step)])}
    return folder.save(step, weights=weights, state={"step": step}, meta={"step": step}, metric=metric, **options)


def names(root):
    """The names in the folder, hidden ones included."""
    return sorted(path.name for path in root.iterdir())


def test_names_sort_by_step_and_latest_is_the_newest(tmp_path):
    """Checkpoints are named for their step; the last one saved is the latest."""
    folder = CheckpointFolder(tmp_path / "run")
    assert folder.latest() is None
    assert folder.best() is None
    for step in (1, 20, 1234):
        path = save(folder, step)
    assert names(folder.root) == ["step-00000001", "step-00000020", "step-00001234"]
    assert folder.latest() == path
    assert load_checkpoint(path).meta["folder"] == {"step": 1234, "order": 3, "metric": None, "higher_is_better": True}


def test_the_last_and_the_best_are_kept(tmp_path):
    """A checkpoint that is neither among the last nor among the best is removed."""
    folder = CheckpointFolder(tmp_path, keep_last=2, keep_best=1)
    for step, metric in enumerate([0.5, 0.9, 0.1, 0.2, math.nan, None]):
        save(folder, step, metric)
    assert [entry.step for entry in folder.checkpoints()] == [1, 4, 5]
    assert folder.best().name == "step-00000001"


@given(
    st.lists(st.none() | st.floats(), min_size=1, max_size=6),
    st.integers(1, 3) | st.none(),
    st.integers(0, 2),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_rotation_keeps_exactly_the_last_and_the_best(tmp_path_factory, metrics, keep_last, keep_best, higher):
    """For any metrics, the set on disk after each save follows from the previous set and the rule."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("rotation"), keep_last, keep_best)
    expected = []
    for step, metric in enumerate(metrics):
        save(folder, step, metric, higher_is_better=higher)
        expected.append(step)
        scored = [s for s in expected if metrics[s] is not None and not math.isnan(metrics[s])]
        best = sorted(scored, key=lambda s: (metrics[s] if higher else -metrics[s], s), reverse=True)
        last = expected[-keep_last:] if keep_last else expected
        expected = [s for s in expected if s in last or s in best[:keep_best]]
        best = [s for s in best if s in expected]
        assert folder.best() == (folder.root / f"step-{best[0]:08d}" if best else None)
        assert [entry.step for entry in folder.checkpoints()] == expected
    shutil.rmtree(folder.root)


def test_a_run_that_went_back_resumes_from_what_it_saved_last(tmp_path):
    """The order of saving decides, not the step, and the same step can be saved again."""
    folder = CheckpointFolder(tmp_path, keep_last=3)
    for step in (100, 200, 150, 200):
        path = save(folder, step)
    assert path.name == "step-00000200-2"
    assert folder.latest() == path
    assert names(tmp_path) == ["step-00000150", "step-00000200", "step-00000200-2"]


def test_damaged_checkpoints_are_skipped_with_a_warning(tmp_path, caplog):
    """`latest` returns the newest complete one; damaged and foreign ones are kept and named in warnings."""
    folder = CheckpointFolder(tmp_path, keep_last=1)
    first = save(folder, 1)
    folder.keep_last = None
    (save(folder, 2) / "state.json").unlink()
    with (save(folder, 3) / "model.safetensors").open("r+b") as file:
        file.truncate(10)
    save_checkpoint(tmp_path / "step-00000004", weights={}, state=None, meta={})
    save_checkpoint(tmp_path / "step-00000005", weights={}, state=None, meta={"folder": 3})
    (tmp_path / "notes").mkdir()
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert folder.latest() == first
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert "state.json is missing" in messages[0]
    assert "is truncated" in messages[1]
    assert "was not saved by CheckpointFolder" in messages[2]
    folder.keep_last = 1
    save(folder, 6)
    assert len(names(tmp_path)) == 6  # only step 1 was removed


def test_leftovers_are_removed_but_never_during_a_save(tmp_path):
    """The temporary directory of a dead process is removed; that of a running one is not."""
    folder = CheckpointFolder(tmp_path)
    (tmp_path / ".tmp-dead").mkdir()
    (tmp_path / ".tmp-dead" / "model.safetensors").write_text("half")
    assert folder.latest(clean=False) is None
    with folder_lock(tmp_path, exclusive=False):
        assert folder.latest() is None
        assert names(tmp_path) == [".tmp-dead"]
    assert folder.latest() is None
    assert names(tmp_path) == []
    (tmp_path / ".tmp-dead").mkdir()
    save(folder, 1)
    assert names(tmp_path) == ["step-00000001"]


def test_a_failed_save_leaves_the_folder_unchanged(tmp_path, monkeypatch):
    """A full disk loses the new checkpoint and nothing else."""
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=0)
    save(folder, 1)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(HalfstepError, match=r"step-00000002 could not be saved: No space"):
        save(folder, 2)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert folder.latest() == tmp_path / "step-00000001"


def test_an_old_checkpoint_that_cannot_be_removed_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    """The new checkpoint is saved, and a warning names the old one."""
    folder = CheckpointFolder(tmp_path, keep_last=1)
    save(folder, 1)

    def deny(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", deny)
    with caplog.at_level(logging.WARNING, "halfstep"):
        save(folder, 2)
    assert "step-00000001 could not be removed: Permission denied" in caplog.text
    assert len(folder.checkpoints()) == 2


def test_invalid_settings_are_rejected(tmp_path):
    """Each invalid setting raises an error that names it, before anything is written."""
    with pytest.raises(SettingError, match="keep_last=0"):
        CheckpointFolder(tmp_path, keep_last=0)
    with pytest.raises(SettingError, match="keep_best=-1"):
        CheckpointFolder(tmp_path, keep_best=-1)
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(SettingError, match="step=-1"):
        save(folder, -1)
    with pytest.raises(SettingError, match="'folder', which CheckpointFolder writes itself"):
        folder.save(1, weights={}, state=None, meta={"folder": 1})
    save(folder, 1, 0.5)
    with pytest.raises(SettingError, match="cannot be compared"):
        save(folder, 2, 0.5, higher_is_better=False)
    save(folder, 2, higher_is_better=False)  # without a metric there is nothing to compare
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.skipif(sys.platform == "win32", reason="Requires: [fork]")
@pytest.mark.parametrize(("program", "status"), [("points", 9), ("background", -signal.SIGKILL)])
def test_death_at_any_call_leaves_the_old_set_or_the_old_set_and_the_new(tmp_path, program, status):
    """A process that dies before any one of its calls to the disk, of a thread too, never leaves half a checkpoint that counts."""
    run = subprocess.run([sys.executable, PROGRAM, program, tmp_path], capture_output=True, text=True, check=True)
    outcomes = json.loads(run.stdout)
    assert len(outcomes) > 20
    assert [f["status"] for f in outcomes] == [status] * (len(outcomes) - 1) + [0]
    step_sets = {tuple(f["steps"]) for f in outcomes}
    assert step_sets == {(2, 3, 4), (2, 3, 4, 5), (2, 4, 5)}  # before, with the new one, after the old one was removed
    for f in outcomes:
        assert f["latest"] == f"step-{f['steps'][-1]:08d}"
        assert f["names"] == [f"step-{step:08d}" for step in f["steps"]]  # leftovers are removed


def kill_while_saving(root, rounds, rng):
    """Kill a saving process after a random number of its calls; after each, everything that counts must be whole."""
    newest = 0
    for _ in range(rounds):
        process = subprocess.Popen([sys.executable, PROGRAM, "loop", root], stdout=subprocess.PIPE, text=True)
        with process:
            while process.stdout.readline() != "saved\n":
                assert process.poll() is None
            for _ in range(rng.randint(1, 40)):
                process.stdout.readline()
            process.kill()
        steps = held(root)
        assert steps == sorted(steps)
        assert steps[-1] > newest
        assert 2 in steps or newest < 2  # the best one
        newest = steps[-1]
        latest = CheckpointFolder(root).latest()
        assert latest == root / f"step-{newest:08d}"
        assert names(root) == [f"step-{step:08d}" for step in steps]
    return newest


def test_a_killed_save_leaves_whole_checkpoints_only(tmp_path):
    """SIGKILL while saving in a loop, three times: what is there is whole and the run goes on from it."""
    assert kill_while_saving(tmp_path / "run", 3, random.Random(1)) > 0


@pytest.mark.slow
def test_many_killed_saves_leave_whole_checkpoints_only(tmp_path):
    """The same, ten times; the deaths at every single call are above."""
    assert kill_while_saving(tmp_path / "run", 10, random.Random(2)) > 0
