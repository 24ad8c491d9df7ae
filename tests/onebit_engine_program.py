"""The compressed optimizers in an Engine on real gloo ranks, run by tests/engine/test_exchange.py; arguments: a folder, then cases."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from halfstep import Engine
from halfstep.errors import SettingError
from halfstep.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from rank_cases import case, everything, hashed, run_cases, same, slow_case

FOLDER = Path(sys.argv[1])
ZERO_ONE = {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}
KINDS = {
    "adam": (OneBitAdam, {"freeze_step": 4}),
    "lamb": (OneBitLamb, {"freeze_step": 4}),
    "zero_one": (ZeroOneAdam, ZERO_ONE),
}


class Run:
    """A small model in an Engine, and the loop that trains it on other data for every rank."""

    def __init__(self, kind="adam", precision="fp16", accumulate=1, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        maker, settings = KINDS[kind]
        self.optimizer = maker(self.model.parameters(), lr=1e-2, **settings | options.pop("settings", {}))
        self.engine = Engine(
            self.model,
            self.optimizer,
            precision,
            accumulate=accumulate,
            **{"backend": "ddp", "max_norm": 1.0} | options,
        )

    def data(self, step, size=4):
        source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        return torch.randn(size, 8, generator=source), torch.randint(3, (size,), generator=source)

    def train(self, start, end, overflow=None):
        """Train these steps; at the step `overflow` the last rank's loss is inf."""
        for step in range(start, end):
            x, y = self.data(step)
            with self.engine.forward():
                loss = F.cross_entropy(self.model(x).float(), y)
            if step == overflow and dist.get_rank() == dist.get_world_size() - 1:
                loss = loss * float("inf")
            self.engine.backward(loss)
            result = self.engine.step()
        return result

    @property
    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


@case
def dense_reductions():
    """How often the backend reduced densely, and what the optimizer sent in its last step."""
    report = {}
    for kind in KINDS:
        run = Run(kind)
        run.train(0, 10)
        before = run.optimizer.wire.sent_bytes
        run.train(10, 11)
        report[kind] = {
            "dense": run.engine.backend.reductions.count,
            "last": run.optimizer.wire.sent_bytes - before,
            "same": same(hashed(*run.weights)) or not run.optimizer.synchronized,
            "synchronized": run.optimizer.synchronized,
            "truth": dict(run.engine.truth().rows),
            "waived": list(run.engine.truth().waived_guarantees),
        }
        run.engine.close()
    return report


@case
def overflow():
    """The last rank overflows in a compressed step: nothing changes on any rank, and the loss scale is the same on all."""
    report = {}
    for kind in KINDS:
        run = Run(kind, scaler=None)
        run.train(0, 9)
        run.optimizer.settle()
        tensors = [*run.model.parameters(), *(v for s in run.optimizer.state.values() for v in s.values())]
        before, schedule = hashed(*tensors), run.optimizer.schedule
        result = run.train(9, 10, overflow=9)
        run.optimizer.settle()
        tensors = [*run.model.parameters(), *(v for s in run.optimizer.state.values() for v in s.values())]
        report[kind] = {
            "skipped": result.skipped,
            "unchanged": before == hashed(*tensors) and schedule == run.optimizer.schedule,
            "ranks": list(run.engine.backend.overflowed_ranks),
            "scale": same(str(run.engine.scaler.get_scale())),
        }
        run.engine.close()
    return report


@case
def engine_equals_own_loop():
    """In fp32 the Engine trains, bit for bit, what the optimizer does with the gradients of this rank in a loop of its own."""
    settings = {"allow_unverified": True}
    run = Run(precision="fp32", max_norm=None, settings=settings)
    alone = Run(precision="fp32", max_norm=None, settings=settings)
    alone.engine.close()
    worst = 0.0
    for step in range(9):
        run.train(step, step + 1)
        x, y = alone.data(step)
        F.cross_entropy(alone.model(x), y).backward()
        alone.optimizer.step()
        alone.optimizer.zero_grad()
        pairs = zip(run.weights, alone.weights, strict=True)
        worst = max(worst, *((a - b).abs().max().item() for a, b in pairs))
    return {"worst": worst, "unverified": run.engine.truth().as_dict()["rows"].get("unverified", "")}


@case
def windows():
    """Micro-batches weighted by their size give what one batch of all their examples gives, also in compressed windows."""
    settings = {"allow_unverified": True}
    split = Run(precision="fp32", accumulate=2, max_norm=None, settings=settings)
    whole = Run(precision="fp32", max_norm=None, settings=settings)
    worst = 0.0
    for step in range(8):
        x, y = split.data(step, size=6)
        parts = (slice(0, 2), slice(2, 6)) if dist.get_rank() else (slice(0, 5), slice(5, 6))
        for part in parts:
            with split.engine.forward():
                loss = F.cross_entropy(split.model(x[part]), y[part])
            split.engine.backward(loss, weight=len(y[part]))
            split.engine.step()
        with whole.engine.forward():
            loss = F.cross_entropy(whole.model(x), y)
        whole.engine.backward(loss)
        whole.engine.step()
        pairs = zip(split.weights, whole.weights, strict=True)
        worst = max(worst, *((a - b).abs().max().item() for a, b in pairs))
    return {"worst": worst, "dense": split.engine.backend.reductions.count}


@case
def clipping():
    """The reported norm is the same on all ranks before the freeze, and each rank's own after it."""
    run = Run(max_norm=0.1)
    return {"same": [same(str(run.train(step, step + 1).grad_norm)) for step in range(6)]}


@case
def wrapped():
    """A DistributedDataParallel around the model does not reduce in compressed windows either."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2)
    engine = Engine(model, optimizer, "fp16")
    for step in range(5):
        x, y = Run.data(None, step)
        with engine.forward():
            loss = F.cross_entropy(model(x).float(), y)
        engine.backward(loss)
        engine.step()
    return {"dense": engine.backend.reductions.count, "same": same(hashed(*model.parameters()))}


@case
def rejections():
    """What is rejected, with the text of the error."""
    texts = {}
    second = nn.Linear(2, 2)

    def attempt(name, **options):
        try:
            Run(**options).engine.close()
        except SettingError as error:
            texts[name] = str(error)

    attempt("bf16", precision="bf16")
    attempt("fp32", precision="fp32")
    attempt("single", backend="single")
    attempt("fsdp", backend="fsdp")
    attempt("compute", settings={"compute": "bf16"})
    attempt(
        "release",
        gradient_release=True,
        precision="bf16",
        max_norm=None,
        settings={"allow_unverified": True},
        backend="single",
    )
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    untouched = nn.Linear(2, 2)
    try:
        Engine(untouched, OneBitAdam(untouched.parameters(), process_group=alone), "fp16-lean", backend="ddp")
    except SettingError as error:
        texts["group"] = f"{error} {untouched.weight.dtype}"
    try:
        Run(settings={"freeze_step": 4 + dist.get_rank()})
    except Exception as error:
        texts["schedule"] = str(error)
    model = nn.ModuleList([nn.Linear(2, 2), second])
    optimizers = [OneBitAdam(model[0].parameters(), freeze_step=2), torch.optim.SGD(second.parameters(), lr=0.1)]
    try:
        Engine(model, optimizers, "fp16", backend="ddp")
    except SettingError as error:
        texts["mixed"] = str(error)
    return {"texts": texts}


@case
def resume():
    """A fresh Engine that loads the checkpoint of step 7 or 10 continues bit for bit, EMA included."""
    report = {}
    for kind in KINDS:
        for precision in ("fp16", "fp16-lean"):
            run = Run(kind, precision, ema=0.9)
            run.train(0, 11)
            synchronized = run.optimizer.synchronized
            folder = FOLDER / f"{kind}-{precision}"
            run.engine.save(folder)
            run.train(11, 17)
            again = Run(kind, precision, ema=0.9)
            again.engine.load(folder)
            again.train(11, 17)
            report[f"{kind} {precision}"] = {
                "equal": everything(run.engine) == everything(again.engine),
                "synchronized": synchronized,
                "errors": all("worker_error" in s for s in again.optimizer.state.values()),
            }
            run.engine.close(), again.engine.close()
    return report


@slow_case
def killed():
    """Save in the compressed stage and train on; then all ranks get a SIGKILL with a window open."""
    runs = {kind: Run(kind, "fp16-lean") for kind in KINDS}
    for kind, run in runs.items():
        run.train(0, 11)
        run.engine.save(FOLDER / f"killed-{kind}")
        run.train(11, 13)
        with run.engine.forward():
            loss = run.model(run.data(13)[0]).float().sum()
        run.engine.backward(loss)
    (FOLDER / f"ready{dist.get_rank()}").touch()
    while len(list(FOLDER.glob("ready*"))) < dist.get_world_size():  # no rank may be in a collective of another
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@slow_case
def after_kill():
    """The resumed runs next to those that were never interrupted."""
    report = {}
    for kind in KINDS:
        again, whole = Run(kind, "fp16-lean"), Run(kind, "fp16-lean")
        again.engine.load(FOLDER / f"killed-{kind}")
        frozen = again.optimizer.schedule.frozen
        errors = sum(float(s["worker_error"].abs().sum()) for s in again.optimizer.state.values())
        again.train(11, 20)
        whole.train(0, 20)
        equal = everything(again.engine) == everything(whole.engine)
        schedules = again.optimizer.schedule == whole.optimizer.schedule
        report[kind] = {"frozen": frozen, "errors": errors > 0, "equal": equal, "schedules": schedules}
        again.engine.close(), whole.engine.close()
    return {"kinds": report}


@slow_case
def other_ranks():
    """A checkpoint of two ranks on another number of them: errors are zero, the schedule continues, training goes on."""
    run = Run("adam", "fp16", ema=0.9)
    run.engine.load(FOLDER / "adam-fp16")
    errors = sum(float(s["worker_error"].abs().sum()) for s in run.optimizer.state.values() if "worker_error" in s)
    frozen = run.optimizer.schedule.frozen_at
    run.train(11, 15)
    return {
        "errors": errors,
        "frozen": frozen,
        "same": same(hashed(*run.weights)),
        "dense": run.engine.backend.reductions.count,
    }


if __name__ == "__main__":
    run_cases(sys.argv[2:])
