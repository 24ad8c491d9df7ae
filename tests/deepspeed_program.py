"""One rank of ZeRO runs under the Engine, and of DeepSpeed on its own: every case prints one line of JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/deepspeed_program.py FOLDER [CASE ...]
"""

import importlib
import logging
import math
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from bare_deepspeed import forget_autocast, gathered, start_bare
from halfstep.backends import deepspeed_backend
from halfstep.backends.deepspeed import compare_gradients, describe_engine
from halfstep.backends.deepspeed.blocks import build_scheduler
from halfstep.backends.deepspeed.selftest import LIMIT
from halfstep.errors import HalfstepError, SettingError
from rank_cases import case, everything, run_cases, same

STAGES = (0, 1, 2, 3)
PRESETS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean")
FOLDER = Path(sys.argv[1])


class Net(nn.Module):
    """Odd sizes, so that fragments cross parameters; `spare` is used only where a case wants it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.norm, self.head = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.spare = nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x, spare=True):
        if self.training:
            self.seen += 1
        hidden = self.norm(torch.tanh(self.entry(x)))
        out = self.head(hidden)
        return out + self.spare(hidden) if spare else out


def batches(count, size=4):
    """For each update the inputs of all ranks."""
    generator = torch.Generator().manual_seed(1)
    ranks = range(dist.get_world_size())
    return [[torch.randn(size, 5, generator=generator) for _ in ranks] for _ in range(count)]


def adamw(model, **settings):
    """Two groups, one without weight decay."""
    vectors, matrices = [p for p in model.parameters() if p.dim() < 2], [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, **settings)


def zero(stage, **settings):
    """The backend of a stage: several buckets, and at stage 3 every weight is partitioned between uses, small ones too."""
    sizes = {"stage": stage, "reduce_bucket_size": 40, **settings}
    return deepspeed_backend(
        {"zero_optimization": sizes | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    )


def build(stage, precision, *, accumulate=1, optimizer=adamw, model=Net, **settings):
    """An Engine on ZeRO, or with `stage` "single" on one process that sees the data of both ranks."""
    model = model()
    if stage == "single":
        settings["backend"], accumulate = "single", accumulate * dist.get_world_size()
    else:
        settings.setdefault("backend", zero(stage))
    return halfstep.Engine(model, optimizer(model), precision, accumulate=accumulate, **settings)


def inputs_of(engine, pair):
    """What this process computes on: its own share, or that of all ranks."""
    return pair if engine.backend.name == "single" else [pair[dist.get_rank()]]


def advance(engine, pairs, *, spoil=None, weigh=False):
    """Train on these batches; per update the loss of rank 0's data, the result, and its own list of outcomes."""
    outcomes = []
    for number, pair in enumerate(pairs):
        for rank, x in enumerate(inputs_of(engine, pair)):
            with engine.forward():
                loss = engine.model(x).float().pow(2).mean()
            owner = rank if engine.backend.name == "single" else dist.get_rank()
            if spoil is not None and number in spoil and owner == number % 2:
                loss = loss * math.inf
            engine.backward(loss, 1.0 + (3 * number + 5 * owner) % 7 if weigh else None)
            result = engine.step()
        if result.boundary:
            outcomes.append({"norm": result.grad_norm, "skipped": result.skipped, "scale": result.scale})
    return outcomes


def masters(engine):
    """Whole fp32 values on the CPU."""
    return {name: getattr(m, "full_tensor", lambda m=m: m)().detach().clone() for name, m in engine.masters().items()}


def distance(one, other):
    """The largest difference between two sets of tensors."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def moments(engine, key="exp_avg"):
    """The first moment of every parameter, whole, by name."""
    state = engine.state_dict()
    saved, names = state["optimizers"][0], state["names"][0]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    pairs = zip(names, numbers, strict=True)
    return {name: saved["state"][i][key].float().clone() for name, i in pairs if i in saved["state"]}


# --- the same numbers as one process ----------------------------------------------------------------------------------


@case
def curves():
    """Clipped training in every preset and stage, with weighted windows: weights and norms against one process."""
    far = {}
    for precision in PRESETS:
        scaler = {"scaler": halfstep.LossScaler(init_scale=2.0**10)} if precision.startswith("fp16") else {}
        for accumulate in (1, 3):
            runs = {}
            for stage in ("single", *STAGES):
                if scaler:
                    scaler = {"scaler": halfstep.LossScaler(init_scale=2.0**10)}
                with build(stage, precision, accumulate=accumulate, max_norm=0.5, **scaler) as engine:
                    outcomes = advance(engine, batches(9), weigh=accumulate > 1)
                    runs[stage] = masters(engine), [o["norm"] for o in outcomes]
            values, norms = runs.pop("single")
            for stage, (own, own_norms) in runs.items():
                apart = max(abs(a - b) / b for a, b in zip(own_norms, norms, strict=True))
                far[f"{precision} {accumulate} {stage}"] = [distance(own, values), apart]
    return {"far": far}


@case
def first_moments():
    """With betas of 0 the first moment is the gradient: at every stage that of one process, also when the scale grows."""
    far, scales = {}, {}
    for precision in ("fp32", "fp16", "fp16-lean", "bf16-lean"):
        runs = {}
        for stage in ("single", *STAGES):
            scaled = precision.startswith("fp16")
            scaler = {"scaler": halfstep.LossScaler(init_scale=2.0**6, growth_interval=2)} if scaled else {}
            with build(stage, precision, optimizer=lambda m: adamw(m, betas=(0.0, 0.0)), **scaler) as engine:
                seen = []
                for pair in batches(4):
                    outcomes = advance(engine, [pair])
                    seen.append((moments(engine), outcomes[-1]["scale"]))
                runs[stage] = seen
        reference = runs.pop("single")
        for stage, seen in runs.items():
            key = f"{precision} {stage}"
            largest = [max(float(g.abs().max()) for g in grads.values()) for grads, _ in reference]
            pairs = zip(seen, reference, largest, strict=True)
            far[key] = [distance(own, theirs) / size for (own, _), (theirs, _), size in pairs]
            scales[key] = [scale for _, scale in seen]
    return {"far": far, "scales": scales}


@case
def fp32_on_16_bit_weights():
    """`compute_fp32` on a layer and on a module around layers: gradients of one process, fp32 outputs, 16-bit weights."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return self.net(x)

    far, formats = {}, {}
    for precision, pattern, model in (("bf16-lean", "head", Net), ("fp16-lean", "net", Outer)):
        runs = {}
        for stage in ("single", *STAGES):
            scaler = {"scaler": halfstep.LossScaler(init_scale=2.0**6)} if precision == "fp16-lean" else {}
            with build(stage, f"{precision},compute_fp32={pattern}", model=model,
                       optimizer=lambda m: adamw(m, betas=(0.0, 0.0)), **scaler) as engine:  # fmt: skip
                head = next(m for name, m in engine.model.named_modules() if name.endswith("head"))
                seen = []
                head.register_forward_hook(lambda _m, _, out, seen=seen: seen.append(str(out.dtype)))
                advance(engine, batches(1))
                formats[f"{precision} {stage}"] = (
                    sorted({str(p.dtype) for p in engine.params.values()}),
                    sorted(set(seen)),
                )
                runs[stage] = moments(engine)
        reference = runs.pop("single")
        largest = max(float(g.abs().max()) for g in reference.values())
        far |= {f"{precision} {stage}": distance(own, reference) / largest for stage, own in runs.items()}
    return {"far": far, "formats": formats}


@case
def overflows():
    """Infinite losses on one rank or the other: scales and skips, and those of the scaler on its own."""
    spoil, count = (1, 2, 6, 9, 10, 11), 16
    settings = {"init_scale": 2.0**8, "growth_interval": 3, "semantics": "deepspeed"}
    scaler, expected = halfstep.LossScaler(**settings), []
    for number in range(count):
        expected.append([number in spoil, scaler.get_scale()])
        scaler.update(torch.tensor(float(number in spoil)))
    found = {}
    for precision in ("fp16", "fp16-lean") if dist.get_world_size() == 2 else ("fp16-lean",):
        for stage in STAGES:
            with build(stage, precision, scaler=halfstep.LossScaler(**settings), max_norm=1.0) as engine:
                outcomes = advance(engine, batches(count), spoil=spoil)
                found[f"{precision} {stage}"] = [[o["skipped"], o["scale"]] for o in outcomes]
    return {"expected": expected, "outcomes": found}


@case
def hard_stops():
    """The message of a run in which every update overflows, on this rank."""
    messages = {}
    for stage in (1, 2, 3):
        engine = build(stage, "fp16", scaler=halfstep.LossScaler(max_skips=3))
        try:
            advance(engine, batches(4), spoil=(0, 1, 2, 3))
        except halfstep.OverflowStop as stop:
            messages[str(stage)] = str(stop)
        engine.close()
    return {"messages": messages}


@case
def skips_change_nothing():
    """Every number of the run, buffers included, before and after a skipped update; afterwards it trains on."""
    equal = {}
    for precision in ("fp32", "bf16-lean", "fp16"):
        for stage in (1, 2, 3):
            with build(stage, precision) as engine:
                advance(engine, batches(2))
                before = _trained_numbers(engine)
                (outcome,) = advance(engine, batches(1), spoil=(0,))
                after = _trained_numbers(engine)
                advance(engine, batches(1))
                moved = _trained_numbers(engine)
                unchanged = all(torch.equal(before[k], after[k]) for k in before)
                changed = any(not torch.equal(moved[k], after[k]) for k in after)
                equal[f"{precision} {stage}"] = [outcome["skipped"], unchanged, changed]
    return {"equal": equal}


def _trained_numbers(engine):
    state = engine.state_dict()
    tensors = {f"model {name}": t for name, t in state["model"].items()}
    for number, entry in state["optimizers"][0]["state"].items():
        tensors |= {f"state {number} {key}": torch.as_tensor(value) for key, value in entry.items()}
    return {name: t.clone() for name, t in tensors.items()}


class Tied(nn.Module):
    """An embedding that is also the output layer, a recomputed layer, and a frozen one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid, self.frozen = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, tokens):
        hidden = checkpoint(self._recomputed, self.embed(tokens).mean(1), use_reentrant=False)
        return self.out(self.frozen(hidden))

    def _recomputed(self, x):
        return torch.tanh(self.mid(x))


@case
def tied_and_frozen():
    """Tied, frozen and recomputed weights against one process, also after a checkpoint was loaded."""
    far = {}
    for precision in ("fp32", "bf16-lean"):
        runs = {}
        for stage in ("single", 1, 2, 3):
            model = Tied()
            settings = {"backend": "single", "accumulate": 2} if stage == "single" else {"backend": zero(stage)}
            with halfstep.Engine(model, torch.optim.AdamW(model.parameters(), 1e-2), precision, **settings) as engine:
                generator = torch.Generator().manual_seed(3)
                for number in range(4):
                    pair = [torch.randint(0, 11, (4, 3), generator=generator) for _ in range(2)]
                    for tokens in inputs_of(engine, pair):
                        with engine.forward():
                            loss = nn.functional.cross_entropy(model(tokens).float(), tokens[:, 0])
                        engine.backward(loss)
                        engine.step()
                    if number == 1 and stage != "single":
                        engine.load(engine.save(FOLDER / f"tied-{precision}-{stage}"))
                runs[stage] = masters(engine)
        reference = runs.pop("single")
        far |= {f"{precision} {stage}": distance(own, reference) for stage, own in runs.items()}
    return {"far": far}


@case
def few_elements():
    """A model of 5 elements, so that of four ranks some step nothing, against one process."""
    far = {}
    for precision in ("fp32", "bf16-lean"):
        runs = {}
        for stage in ("single", 1, 2, 3):
            torch.manual_seed(0)
            model = nn.Linear(5, 1, bias=False)
            settings = (
                {"backend": "single", "accumulate": dist.get_world_size()}
                if stage == "single"
                else {"backend": zero(stage)}
            )
            with halfstep.Engine(
                model, torch.optim.AdamW(model.parameters(), 1e-2), precision, max_norm=0.1, **settings
            ) as engine:
                advance(engine, batches(4))
                if stage != "single":
                    engine.load(engine.save(FOLDER / f"few-{precision}-{stage}"))
                runs[stage] = masters(engine)
        reference = runs.pop("single")
        far |= {f"{precision} {stage}": distance(own, reference) for stage, own in runs.items()}
    return {"far": far}


# --- windows ----------------------------------------------------------------------------------------------------------


@case
def windows():
    """Short windows, several losses of one micro-batch, and dropped windows, against one process."""
    far = {}
    for stage in ("single", 1, 2, 3):
        with build(stage, "fp32", accumulate=4) as engine:
            pairs = batches(8)
            for x in [x for pair in pairs[:2] for x in inputs_of(engine, pair)]:
                with engine.forward():
                    losses = engine.model(x).pow(2).mean(), engine.model(2 * x).abs().mean()
                for loss in losses:
                    engine.backward(loss)
                engine.step()
            assert engine.step(last=True).boundary
            advance(engine, pairs[2:3])
            engine.reset_window()
            for x in inputs_of(engine, pairs[3]):
                with engine.forward():
                    loss = engine.model(x).pow(2).mean()
                engine.backward(loss)
                engine.step()
            engine.step(last=True)
            far[str(stage)] = masters(engine)
    reference = far.pop("single")
    return {"far": {stage: distance(own, reference) for stage, own in far.items()}}


@case
def unused_parameters():
    """A parameter that a window does not use has a gradient of 0, and not that of the window before."""
    moved = {}
    for stage in (1, 2, 3):
        with build(stage, "fp32", optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)) as engine:
            advance(engine, batches(1))
            before = masters(engine)
            with engine.forward():
                loss = engine.model(batches(1)[0][dist.get_rank()], spare=False).pow(2).mean()
            engine.backward(loss)
            engine.step()
            after = masters(engine)
            moved[f"halfstep {stage}"] = float((after["spare.weight"] - before["spare.weight"]).abs().max())
        engine = bare(stage, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        values = []
        for spare in (True, False):
            engine.backward(engine(batches(1)[0][dist.get_rank()], spare=spare).pow(2).mean())
            engine.step()
            with gathered(engine):
                values.append(engine.module.spare.weight.detach().clone())
        moved[f"bare {stage}"] = float((values[1] - values[0]).abs().max())
        engine.destroy()
    return {"moved": moved}


@case
def evaluation_and_ema():
    """Validation between updates, and the EMA where weights are whole and fp32."""
    far = {}
    runs = {}
    for stage in ("single", 1, 2):
        with build(stage, "bf16", ema=0.5) as engine:
            advance(engine, batches(3))
            with engine.evaluate(ema=True):
                out = engine.model(batches(1)[0][0]).float()
            advance(engine, batches(1))
            runs[str(stage)] = {"out": out.detach(), **masters(engine)}
    with build(3, "bf16") as engine:
        advance(engine, batches(3))
        with engine.evaluate():
            assert engine.model(batches(1)[0][0]).isfinite().all()
        advance(engine, batches(1))
        three = masters(engine)
    reference = runs.pop("single")
    far = {stage: distance(own, reference) for stage, own in runs.items()}
    far["3"] = distance(three, {name: reference[name] for name in three})
    return {"far": far}


# --- checkpoints ------------------------------------------------------------------------------------------------------


MOVES = {"fp32": (1, 2, 3), "bf16-lean": (1, 3), "fp16-lean": (2,)}  # stages whose checkpoints other backends load


@case
def checkpoints():
    """A resumed run has the same bits; other backends continue from it, and it from theirs."""
    exact, far = {}, {}
    for precision in ("fp32", "bf16-lean", "fp16-lean"):
        for stage in (1, 2, 3):
            key, path = f"{precision} {stage}", FOLDER / f"{precision}-{stage}"
            with build(stage, precision, max_norm=0.5) as engine:
                advance(engine, batches(3))
                engine.save(path)
                advance(engine, batches(6)[3:])
                end, bits = masters(engine), everything(engine)
            with build(stage, precision, max_norm=0.5) as engine:
                engine.load(path)
                advance(engine, batches(6)[3:])
                exact[key] = everything(engine) == bits and same(bits)
            if stage not in MOVES[precision]:
                continue
            for name in ("ddp", "fsdp"):
                with build(stage, precision, max_norm=0.5, backend=name) as engine:
                    engine.load(path)
                    advance(engine, batches(6)[3:])
                    far[f"{key} {name}"] = distance(masters(engine), end)
            with build("single", precision, max_norm=0.5) as engine:
                engine.load(path)
                if dist.get_rank() == 0:
                    engine.save(f"{path}-single")
                dist.barrier()
                advance(engine, batches(6)[3:])
                far[f"{key} single"] = distance(masters(engine), end)
            other = 1 + stage % 3
            with build(other, precision, max_norm=0.5) as engine:
                engine.load(f"{path}-single")
                advance(engine, batches(6)[3:])
                far[f"{key} back"] = distance(masters(engine), end)
    return {"exact": exact, "far": far}


# --- offloading -------------------------------------------------------------------------------------------------------


@case
def offloaded():
    """Masters and states on the CPU: weights against one process, after skips and windows, and bits after a resume."""
    far, exact, rows = {}, {}, ""
    offload = {"offload_optimizer": {"device": "cpu"}}
    for precision in ("fp32", "bf16-lean", "fp16-lean"):
        runs = {}
        for stage in ("single", 1, 2, 3):
            settings = {"accumulate": 2, "max_norm": 0.5}
            if precision == "fp16-lean":
                settings["scaler"] = halfstep.LossScaler(init_scale=2.0**10)
            if stage != "single":
                settings["backend"] = zero(stage, **offload)
            with build(stage, precision, **settings) as engine:
                advance(engine, batches(8), spoil=(2,), weigh=True)
                runs[stage] = masters(engine)
                rows = engine.truth().rows
        reference = runs.pop("single")
        far |= {f"{precision} {stage}": distance(own, reference) for stage, own in runs.items()}
    for stage in (1, 2, 3):
        path = FOLDER / f"offloaded-{stage}"
        with build(stage, "bf16-lean", backend=zero(stage, **offload)) as engine:
            advance(engine, batches(2))
            engine.save(path)
            advance(engine, batches(4)[2:])
            bits = everything(engine)
        with build(stage, "bf16-lean", backend=zero(stage, **offload)) as engine:
            engine.load(path)
            advance(engine, batches(4)[2:])
            exact[str(stage)] = everything(engine) == bits and same(bits)
    moved = {}
    for stage in (1, 2, 3):
        settings = {"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "backend": zero(stage, **offload)}
        with build(stage, "fp32", **settings) as engine:
            advance(engine, batches(1))
            before = masters(engine)
            with engine.forward():
                loss = engine.model(batches(1)[0][dist.get_rank()], spare=False).pow(2).mean()
            engine.backward(loss)
            engine.step()
            moved[stage] = float((masters(engine)["spare.weight"] - before["spare.weight"]).abs().max())
    return {"far": far, "exact": exact, "moved": moved, "row": dict(rows)["master"]}


# --- watching ---------------------------------------------------------------------------------------------------------


def watched_run(stage, precision, **settings):
    """The last sample of a watched run, of whose steps the fourth is skipped, and its skip event."""
    events = []
    watch = halfstep.Watch(every=1, outlet=events.append)
    with build(stage, precision, watch=watch, max_norm=0.5, **settings) as engine:
        advance(engine, batches(6), spoil=(3,))
    (skip,) = [event for event in events if event.kind == "skip"]
    return watch.samples[-1], [skip.step, skip.message]


@case
def watched():
    """Samples of fragments against those of whole tensors in one process: sizes, extremes and updates."""
    reports = {}
    for precision in ("fp32", "bf16-lean"):
        whole, skip = watched_run("single", precision)
        runs = {str(stage): zero(stage) for stage in (1, 2, 3)}
        if precision == "fp32":
            runs["2 offloaded"] = zero(2, offload_optimizer={"device": "cpu"})
        for name, backend in runs.items():
            sample, own_skip = watched_run(backend.stage, precision, backend=backend)
            numels, extremes, ratios = [], [], []
            for one, other in ((whole.gradients, sample.gradients), (whole.weights, sample.weights)):
                numels += [other.keys() == one.keys(), *(other[n].numel == stats.numel for n, stats in one.items())]
                extremes += [abs(other[n].largest / stats.largest - 1) for n, stats in one.items()]
            ratios = [abs(sample.updates[n].ratio / update.ratio - 1) for n, update in whole.updates.items()]
            moving = [sample.updates[n].moving == update.moving for n, update in whole.updates.items()]
            reports[f"{precision} {name}"] = {
                "numels": all(numels), "extremes": max(extremes), "ratios": max(ratios), "moving": all(moving),
                "same": same(repr(sample.gradients)), "skip": [skip, own_skip],
            }  # fmt: skip
    return {"reports": reports}


# --- memory ------------------------------------------------------------------------------------------------------------


def storage_bytes(tensors):
    """The bytes of the distinct storages of tensors."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors) if s.nbytes()}.values())


@case
def stored_bytes():
    """What this rank stores when a window is closed, and the sizes of the parameters, for the planner."""
    stored = {}
    for precision in ("fp32", "bf16-lean", "fp16-lean"):
        for stage in (1, 2, 3):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64), nn.Linear(64, 48))
            sizes = [p.numel() for p in model.parameters()]
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            with halfstep.Engine(model, optimizer, precision, backend=zero(stage)) as engine:
                for number in range(2):
                    with engine.forward():
                        loss = model(torch.randn(4, 48)).float().pow(2).mean()
                    engine.backward(loss)
                    if number == 0:
                        engine.step()
                backend, part = engine.backend, engine.backend._live()
                window = [*part.pending(), *(p.grad for p in model.parameters() if p.grad is not None)]
                open_bytes = storage_bytes(window)
                del window
                backend.reduce_gradients()
                inner = backend.engine.optimizer.optimizer
                states = [t for s in inner.state.values() for k, t in s.items() if k != "step"]
                grads = [*backend.gradients().values(), *part.pending()]
                grads += [p.grad for p in model.parameters() if p.grad is not None]
                stored[f"{precision} {stage}"] = {
                    "weights": storage_bytes([getattr(p, "ds_tensor", p).data for p in model.parameters()]),
                    "gradients": max(open_bytes, storage_bytes(grads)),
                    "master": storage_bytes(part.flats),
                    "states": storage_bytes(states),
                }
                engine.reset_window()
    return {"stored": stored, "sizes": sizes}


# --- rejections -------------------------------------------------------------------------------------------------------


@case
def rejections():
    """What ZeRO cannot do is an error before anything is changed, or instead of a silent loss."""
    messages = {}

    def attempt(name, work):
        try:
            work()
        except SettingError as error:
            messages[name] = str(error)
        else:
            messages[name] = "accepted"

    norms = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sgd = torch.optim.SGD
    attempt(
        "batch norm", lambda: halfstep.Engine(norms, sgd(norms.parameters(), 0.1), "bf16-lean", backend="deepspeed")
    )
    attempt(
        "two optimizers",
        lambda: build(2, "fp32", optimizer=lambda m: [sgd(m.entry.parameters(), 0.1), sgd(m.head.parameters(), 0.1)]),
    )
    attempt("adafactor", lambda: build(2, "fp32", optimizer=lambda m: torch.optim.Adafactor(m.parameters())))
    attempt("adagrad", lambda: build(2, "fp32", optimizer=lambda m: torch.optim.Adagrad(m.parameters())))
    attempt("lean", lambda: build(2, "fp32", optimizer=lambda m: halfstep.optim.AdamW(m.parameters())))
    attempt("8bit", lambda: build(2, "bf16-lean,states=8bit"))
    attempt("keep_fp32", lambda: build(2, "bf16-lean,keep_fp32=head"))
    attempt("compile", lambda: build(2, "fp32", compile=True))
    attempt("ema", lambda: build(3, "fp32", ema=0.9))
    attempt("release", lambda: build(2, "fp32", gradient_release=True))
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}}}
    attempt("offload", lambda: build(2, "fp32", backend=deepspeed_backend(offload)))
    attempt(
        "clipping",
        lambda: build(2, "fp32", backend=deepspeed_backend({"gradient_clipping": 1.0}, stage=2), max_norm=2.0),
    )
    attempt("precision", lambda: build(2, "fp32", backend=deepspeed_backend({"fp16": {"enabled": True}}, stage=2)))
    with build(2, "fp32") as engine:
        with engine.forward():
            loss = engine.model(batches(1)[0][0]).pow(2).mean()
        engine.backward(loss)
        attempt("unscale", engine.unscale)
        attempt("optimizer.step", engine.optimizers[0].inner.step)
        engine.step()

    def freeze(model):
        model.spare.requires_grad_(requires_grad=False)
        return adamw(model)

    with build(3, "fp32") as engine:
        with engine.forward():
            loss = engine.model(batches(1)[0][0]).pow(2).mean()
        attempt("retain_graph", lambda: engine.backward(loss, retain_graph=True))
    with build(1, "fp32", optimizer=freeze) as engine:
        advance(engine, batches(1))
        engine.model.spare.requires_grad_(requires_grad=True)
        attempt("unfrozen", lambda: advance(engine, batches(1)))
    return {"messages": messages}


# --- the first update -------------------------------------------------------------------------------------------------


@case
def wrong_gradients_stop():
    """A factor of 2 between the reduced gradient and the optimizer stops the run before its first update."""
    found = {}
    for stage in (1, 2, 3):
        for precision in ("fp32", "bf16-lean"):
            engine = build(stage, precision)
            before = masters(engine)
            zero = engine.backend.engine.optimizer
            step = zero.step

            def halved(zero=zero, step=step, engine=engine):
                torch._foreach_mul_(list(engine.backend.gradients().values()), 0.5)
                step()

            zero.step = halved
            try:
                advance(engine, batches(1))
            except HalfstepError as error:
                found[f"{precision} {stage}"] = [str(error), distance(masters(engine), before)]
            engine.close()
    with build(2, "bf16-lean") as engine:
        advance(engine, batches(1))
        row = dict(engine.truth().rows)["first gradient"]
    return {"found": found, "row": row, "limit": LIMIT}


# --- DeepSpeed on its own ---------------------------------------------------------------------------------------------


def bare(stage, mode=None, *, optimizer=adamw, model=None, **config):
    """An engine of deepspeed.initialize, without Halfstep."""
    model = model or Net()
    block = {mode: {"enabled": True}} if mode else {}
    return start_bare(model, optimizer(model), {"zero_optimization": {"stage": stage}} | block | config)


def drive(engine, count, *, dtype=torch.float32, spoil=(), size=1.0):
    """Train a bare engine on losses of this size; returns its comparison of gradients."""
    with compare_gradients(engine) as comparison:
        for number, pair in enumerate(batches(count)):
            loss = engine(pair[dist.get_rank()].to(dtype)).float().pow(2).mean() * size
            engine.backward(loss * math.inf if number in spoil else loss)
            engine.step()
    return comparison


@case
def bare_factors():
    """The gradient that reached the optimizer of DeepSpeed itself, as a multiple of the true one, step by step."""
    ratios, faults = {}, {}
    fp16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}
    autocast = {"enabled": True, "dtype": "float16"}
    runs = {
        "fp16 stage 0": (0, {"fp16": fp16}, torch.float16),
        "fp16 stage 1": (1, {"fp16": fp16}, torch.float16),
        "fp16 stage 2": (2, {"fp16": fp16}, torch.float16),
        "fp16 stage 3": (3, {"fp16": fp16}, torch.float16),
        "bf16 stage 1": (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, torch.bfloat16),
        "fp32 stage 0": (0, {}, torch.float32),
        "fp32 stage 2": (2, {"gradient_clipping": 0.1}, torch.float32),
        "autocast fp16 clipped stage 2": (2, {"torch_autocast": autocast, "gradient_clipping": 1.0}, torch.float32),
    }
    for name, (stage, config, dtype) in runs.items():
        engine = bare(stage, **config)
        # Its loss scale is fixed at 65536 to start with, under which losses of 1 overflow.
        comparison = drive(engine, 4, dtype=dtype, size=1e-3 if "torch_autocast" in config else 1.0)
        ratios[name] = [None if step is None else step.ratio for step in comparison.steps]
        report = describe_engine(engine)
        faults[name] = [fault.id for fault in report.faults]
        assert str(report)
        assert "step" not in vars(engine), "the wrapped methods are still there"
        assert "backward" not in vars(engine)
        engine.destroy()
        forget_autocast()
    return {"ratios": ratios, "faults": faults}


class One(nn.Module):
    """A weight whose gradient is 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))

    def forward(self):
        return self.w.sum()


@case
def sixteen_bit_sums():
    """The mean of 512 gradients of 1, or of 256 and 63 times 1, as SGD applied it: bf16 sums stop at 256."""
    applied = {}
    for stage, first, count in ((1, 256.0, 64), (2, 1.0, 512), (3, 256.0, 64)):
        factors = [first] + [1.0] * (count - 1)
        engine = bare(
            stage,
            "bf16",
            model=One(),
            optimizer=lambda m: torch.optim.SGD(m.parameters(), 1.0),
            gradient_accumulation_steps=count,
        )
        for factor in factors:
            engine.backward(engine() * factor)
            engine.step()
        with gathered(engine):
            applied[f"bare {stage}"] = -float(engine.module.w.detach()[0])
        engine.destroy()
        model = One()
        settings = {"accumulate": count, "backend": zero(stage)}
        with halfstep.Engine(model, torch.optim.SGD(model.parameters(), 1.0), "bf16-lean", **settings) as ours:
            for factor in factors:
                with ours.forward():
                    loss = model() * factor
                ours.backward(loss)
                ours.step()
            applied[f"halfstep {stage}"] = -float(masters(ours)["w"][0])
        applied[f"true {stage}"] = sum(factors) / count
    return {"applied": applied}


@case
def endless_skips():
    """A loss scale that is too large for the losses, under torch_autocast fp16: which updates were applied, here too."""
    autocast = {"enabled": True, "dtype": "float16"}
    engine = bare(2, torch_autocast=autocast)
    comparison = drive(engine, 8, size=8.0)  # its loss scale starts at 65536
    applied = {"bare": [step is not None for step in comparison.steps]}
    engine.destroy()
    try:
        message = str(build(2, "fp16"))
    except SettingError as error:
        message = str(error)
    forget_autocast()
    with build(2, "fp16", scaler=halfstep.LossScaler(init_scale=2.0**16, hysteresis=1)) as ours:
        applied["halfstep"] = [not o["skipped"] for o in advance(ours, batches(8))]
    return {"applied": applied, "message": message}


SCHEDULES = [
    ("WarmupLR", {"warmup_num_steps": 8, "warmup_min_lr": 0.01}),
    ("WarmupLR", {"warmup_num_steps": 8, "warmup_max_lr": 0.3, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"warmup_num_steps": 5, "total_num_steps": 20, "warmup_max_lr": 0.2, "warmup_min_lr": 0.02}),
    ("WarmupDecayLR", {"warmup_num_steps": 1, "total_num_steps": 25}),
    (
        "WarmupCosineLR",
        {"warmup_num_steps": 6, "total_num_steps": 24, "warmup_min_ratio": 0.1, "warmup_type": "linear"},
    ),
    ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 10, "cos_min_ratio": 0.05}),
]


@case
def schedules():
    """The rate of every update, past the end of each schedule: DeepSpeed's classes, and those built from its configuration."""
    classes, far = importlib.import_module("deepspeed.runtime.lr_schedules"), []
    for name, settings in SCHEDULES:
        rates = []
        for build_one in (
            lambda optimizer, name=name, settings=settings: getattr(classes, name)(optimizer, **settings),
            lambda optimizer, name=name, settings=settings: build_scheduler(
                {"type": name, "params": settings}, optimizer
            ),
        ):
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
            scheduler = build_one(optimizer)
            rates.append([])
            for _ in range(30):
                rates[-1].append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()
        far.append(max(abs(a - b) for a, b in zip(*rates, strict=True)))
    return {"far": far}


@case
def phantom_steps():
    """The step count of a bare 16-bit engine of stage 0 before its first step, and the weights it began with."""
    engine = bare(0, "bf16")
    states = [s for s in engine.optimizer.optimizer.state.values() if "step" in s]
    steps = {"bare": max((float(s["step"]) for s in states), default=0.0)}
    engine.destroy()
    with build(0, "bf16-lean") as ours:
        saved = ours.state_dict()["optimizers"][0]["state"]
        steps["halfstep"] = max((float(s.get("step", 0)) for s in saved.values()), default=0.0)
    return {"steps": steps}


@case
def resumed_settings():
    """The clipping norm after a resume with another one in the configuration, on DeepSpeed and here."""
    path, norms = str(FOLDER / "bare"), {}
    engine = bare(2, "bf16", gradient_clipping=1.0)
    drive(engine, 1, dtype=torch.bfloat16)
    engine.save_checkpoint(path)
    engine.destroy()
    engine = bare(2, "bf16", gradient_clipping=0.25)
    engine.load_checkpoint(path)
    norms["bare"] = float(engine.optimizer.clip_grad)
    engine.destroy()
    with build(2, "bf16-lean", max_norm=1.0) as ours:
        advance(ours, batches(1))
        ours.save(FOLDER / "norm")
    with build(2, "bf16-lean", max_norm=0.25) as ours:
        ours.load(FOLDER / "norm")
        norms["halfstep"] = ours.max_norm
    return {"norms": norms}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    run_cases(sys.argv[2:])
