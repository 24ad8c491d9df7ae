"""One rank of loops over parameters that FSDP2 sharded, raw and of the libraries, with a Monitor: one line of JSON per case.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/monitor_shards_program.py FOLDER [CASE ...]
"""

import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import halfstep
from halfstep.errors import OverflowStop, SettingError
from halfstep.integrations.monitor import Monitor
from rank_cases import case, hashed, run_cases, same

os.environ |= {"LOCAL_RANK": os.environ["RANK"], "ACCELERATE_USE_CPU": "true"}
DIM = 5  # odd: the shards of two ranks have other sizes, and one rank has nothing of the last bias
FOLDER = sys.argv[1]


class Net(nn.Module):
    """Returns its loss, as models of transformers do; the second layer overflows where it is made to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, DIM), nn.Linear(DIM, 1)
        self.overflows = False

    def forward(self, x, labels=None):
        out = self.second(self.first(x))
        return {"loss": (out * 1e30 * 1e30 if self.overflows else out).square().mean(), "logits": out}


def batch(step, rank=None):
    """The examples of a rank."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(step + 10 * rank))


def train(net, optimizer, monitor, scaler=None, steps=4, bad=(1,)):
    """Some steps, of which rank 1 overflows in `bad`; which of them moved the weights, and the error that ended them."""
    moved = []
    try:
        for step in range(steps):
            net.overflows = step in bad and dist.get_rank() == 1
            before = [p.full_tensor().detach().clone() for p in net.parameters()]
            loss = net(batch(step))["loss"]
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            monitor.end_step()
            moved.append(
                any(not torch.equal(p.full_tensor(), b) for p, b in zip(net.parameters(), before, strict=True))
            )
    except OverflowStop as error:
        return moved, str(error)
    finally:
        monitor.close()
    return moved, ""


def samples_of(watch):
    """The gradients, weights and updates of every sample, as plain values."""
    return [
        {
            "step": sample.step,
            "skipped": sample.skipped,
            "scale": sample.scale,
            "gradients": [stats.to_record() for stats in sample.gradients.values()],
            "weights": [stats.to_record() for stats in sample.weights.values()],
            "ratios": {name: round(stats.ratio, 5) for name, stats in sample.updates.items()},
        }
        for sample in watch.samples
    ]


def report(monitor, moved, error):
    """What a rank saw, and whether all ranks saw the same."""
    events = [(e.kind, e.step) for e in monitor.watch.events if e.kind not in {"nan-loss", "loss-spike"}]
    numbers = samples_of(monitor.watch)
    return {
        "moved": moved,
        "error": error,
        "samples": numbers,
        "events": events,
        "same": same(repr((moved, bool(error), numbers, events))),
        "losses": [e.step for e in monitor.watch.events if e.kind == "nan-loss"],
    }


def raw(scaler=None, **settings):
    """A raw loop over shards."""
    net = fully_shard(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = Monitor(net, [optimizer], scaler, every=1, max_skips=settings.pop("max_skips", 25))
    monitor.follow(net)
    moved, error = train(net, optimizer, monitor, scaler, **settings)
    return report(monitor, moved, error)


@case
def unscaled():
    """No scaler: a Guard."""
    return raw()


@case
def torch_scaler():
    """torch's scaler."""
    return raw(torch.amp.GradScaler("cpu", init_scale=256.0))


@case
def own_scaler():
    """halfstep.GradScaler."""
    return raw(halfstep.GradScaler("cpu", init_scale=256.0))


@case
def stops():
    """Each kind of loop stops on every rank at the same step, though one rank only overflows."""
    own = halfstep.GradScaler("cpu", init_scale=256.0, max_skips=2)
    runs = {
        "guard": raw(max_skips=2, bad=(1, 2)),
        "torch": raw(torch.amp.GradScaler("cpu", init_scale=256.0), max_skips=2, bad=(1, 2)),
        "own": raw(own, max_skips=None, bad=(1, 2)),
    }
    return {name: {key: run[key] for key in ("moved", "error", "same")} for name, run in runs.items()}


@case
def whole():
    """The same steps in one process, with the gradients of both ranks."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = halfstep.Watch(net, every=1).attach(optimizer)
    for step in range(4):
        if step == 1:
            continue
        optimizer.zero_grad()
        (sum(net(batch(step, rank))["loss"] for rank in range(2)) / 2).backward()
        optimizer.step()
    watch.close()
    return {"samples": samples_of(watch)}


@case
def guard_of_another_loop():
    """A Guard with a group skips on all ranks; without one it is rejected."""
    net = fully_shard(Net())
    for optimizer in (torch.optim.AdamW(net.parameters(), lr=0.1), halfstep.optim.AdamW(net.parameters(), lr=0.1)):
        try:
            halfstep.Guard(optimizer)
        except SettingError as error:
            rejected = "process_group" in str(error)
        guard = halfstep.Guard(optimizer, process_group=dist.group.WORLD)
        net.overflows = dist.get_rank() == 1
        before = hashed(*(p.full_tensor() for p in net.parameters()))
        net(batch(0))["loss"].backward()
        optimizer.step()
        unchanged = before == hashed(*(p.full_tensor() for p in net.parameters()))
        guard.close()
        if not (rejected and unchanged and guard.counts.skips == 1):
            return {"right": False}
    return {"right": True}


@case
def other_settings():
    """Ranks that would sample other steps raise on every rank."""
    net = fully_shard(Net())
    try:
        halfstep.Watch(net, every=1 + dist.get_rank()).attach(torch.optim.SGD(net.parameters(), lr=0.1))
    except SettingError as error:
        return {"error": str(error)}
    return {"error": ""}


@case
def no_replay():
    """`record` is rejected where a forward needs every rank."""
    net = fully_shard(Net())
    watch = halfstep.Watch(net).attach(torch.optim.SGD(net.parameters(), lr=0.1))
    try:
        watch.record(lambda: None)
    except SettingError as error:
        return {"error": str(error)}
    return {"error": ""}


@case
def first_fsdp():
    """The first FSDP is guarded on all ranks."""
    net = Net()
    wrapped = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    monitor = Monitor(wrapped, [optimizer])
    net.overflows = dist.get_rank() == 1
    wrapped(batch(0))["loss"].backward()
    optimizer.step()
    finite = all(bool(p.isfinite().all()) for p in wrapped.parameters())
    skips = [guard.counts.skips for guard in monitor._guards]
    monitor.close()
    return {"finite": finite, "skips": skips}


def run_accelerated(scaler):
    """Four steps of Accelerate, then a run of overflows."""
    from accelerate import Accelerator, DistributedType
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from halfstep.integrations.accelerate import attach

    AcceleratorState._reset_state()
    PartialState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    # Accelerate chooses FSDP on GPUs only; what it then does with the model and the optimizer also runs on gloo ranks.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaler else None  # it makes one on GPUs only
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    session = attach(accelerator, every=1, max_skips=2)
    moved, error = [], ""
    try:
        for step in range(6):
            model.overflows = step in {1, 3, 4} and dist.get_rank() == 1
            before = [p.full_tensor().detach().clone() for p in model.parameters()]
            accelerator.backward(model(batch(step))["loss"])
            optimizer.step()
            optimizer.zero_grad()
            now = [p.full_tensor() for p in model.parameters()]
            moved.append(any(not torch.equal(a, b) for a, b in zip(now, before, strict=True)))
    except OverflowStop as stop:
        error = str(stop)
    session.close()
    truth = session.truth
    return report(session, moved, error) | {"master": truth.as_dict()["facts"]["master"]["formats"]}


@case
def accelerate():
    """Accelerate without a scaler."""
    return run_accelerated(scaler=False)


@case
def accelerate_scaled():
    """Accelerate with its scaler of FSDP2, which is torch's."""
    return run_accelerated(scaler=True)


@case
def trainer():
    """The Trainer with FSDP2 and the callback."""
    from accelerate.state import AcceleratorState, PartialState
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from halfstep.integrations.transformers import HalfstepCallback

    AcceleratorState._reset_state()
    PartialState._reset_state()

    class Sharded(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            from accelerate import DistributedType
            from accelerate.utils import FullyShardedDataParallelPlugin

            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True
            )
            self.accelerator.state.distributed_type, self.accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
            self.is_fsdp_enabled = True

    class Overflow(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            model.overflows = state.global_step in {1, 3, 4} and dist.get_rank() == 1

    arguments = TrainingArguments(
        FOLDER, use_cpu=True, max_steps=6, per_device_train_batch_size=2, max_grad_norm=0.0, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant",
    )  # fmt: skip
    data = [{"x": batch(n, 0)[0], "labels": torch.zeros(1)} for n in range(24)]
    callback = HalfstepCallback(every=1, max_skips=2)
    kind = (torch.optim.SGD, {"lr": 0.1})
    run = Sharded(Net(), arguments, train_dataset=data, callbacks=[Overflow(), callback], optimizer_cls_and_kwargs=kind)
    run.remove_callback(PrinterCallback)
    error = ""
    try:
        run.train()
    except OverflowStop as stop:
        error = str(stop)
    monitor = callback._monitor
    monitor.close()
    finite = all(bool(p.full_tensor().isfinite().all()) for p in run.model.parameters())
    truth = monitor.truth.as_dict()["facts"]["weights"]["formats"]
    return report(monitor, [], error) | {"finite": finite, "weights": truth}


if __name__ == "__main__":
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    run_cases(sys.argv[2:])
