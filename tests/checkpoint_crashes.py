"""Programs that save checkpoints and die: `loop ROOT` saves until it is killed, `points ROOT` dies at every call.

`background ROOT` is `points` for a save in the background, which ends with SIGKILL. `points` forks a child for each call that touches the disk; the child dies right before that call. The parent prints,
for each death, what is left in the folder.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.checkpoint.saver import Saver

WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def save(folder, step, size=16, **options):
    """Save a checkpoint whose contents identify its step."""
    state = {"m": torch.full((size,), float(step)), "step": step}
    folder.save(
        step,
        weights={"w": torch.full((size,), float(step))},
        state=state,
        meta={"step": step},
        metric=-abs(step - 2),
        **options,
    )


def held(root):
    """The steps of the whole checkpoints, each verified."""
    steps = []
    for entry in CheckpointFolder(root).checkpoints():
        loaded = load_checkpoint(entry.path)
        assert loaded.state["step"] == loaded.meta["step"] == entry.step
        assert bool((loaded.weights["w"] == entry.step).all())
        steps.append(entry.step)
    return steps


def loop(root):
    """Save a few megabytes again and again, after whatever is there; a line on stdout for each call and each save."""
    folder = CheckpointFolder(root, keep_last=2, keep_best=1)
    step = max(held(root), default=0)
    out = sys.stdout.fileno()

    def report(event, args):
        if event in WATCHED and str(root) in str(args[0]):
            os.write(out, b"call\n")

    sys.addaudithook(report)
    while True:
        step += 1
        save(folder, step, size=500_000)
        os.write(out, b"saved\n")


def die_at(number, folder, step, *, background):
    """In a child: save, and die before the call of that number that touches the disk."""
    calls = 0

    def count(event, args):
        nonlocal calls
        if (event in WATCHED and str(folder.root) in str(args[0])) or event == "fsync":
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL) if background else os._exit(9)

    real = os.fsync
    os.fsync = lambda handle: (count("fsync", ()), real(handle))[1]
    shutil.rmtree.avoids_symlink_attacks = False
    shutil._use_fd_functions = False  # so that every removal passes the hook with its path
    sys.addaudithook(count)
    saver = Saver()
    save(folder, step, saver=saver, wait=not background)
    saver.finish()
    os._exit(0)


def background(root):
    """As `points`, with a thread that writes while the process is killed."""
    points(root, background=True)


def points(root, *, background=False):
    """Die at every point of the fifth save, which also removes an old checkpoint, each time from the same start."""
    start, here = root / "start", root / "here"
    for step in (1, 2, 3, 4):
        save(CheckpointFolder(start, keep_last=2, keep_best=1), step)
    outcomes = []
    for number in range(1, 1000):
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(start, here)
        child = os.fork()
        if not child:
            die_at(number, CheckpointFolder(here, keep_last=2, keep_best=1), 5, background=background)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        steps = held(here)
        latest = CheckpointFolder(here).latest()
        names = sorted(path.name for path in here.iterdir())
        outcomes.append({"status": status, "steps": steps, "latest": latest.name, "names": names})
        if status == 0:
            break
    print(json.dumps(outcomes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"loop": loop, "points": points, "background": background}[sys.argv[1]](Path(sys.argv[2]))
