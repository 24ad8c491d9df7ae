"""Random runs of the Engine as plain data: a Config, and moves such as ("step", {"last": True}).

Both come from one seed and print as Python, so a failing run is a program. A move never depends on the ones before it:
where a call is not allowed (a step without a backward, a save inside a window) the Engine must reject it, and that is
what the run then checks. So any part of a sequence is a sequence, and a failing one can be shortened by leaving out moves.
"""

import random
from dataclasses import dataclass

import torch

from fuzz_reference import DTYPES

OPTIONS = {
    "adamw": {"betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.05},
    "sgd": {"momentum": 0.9, "weight_decay": 0.01},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.1},
    "rmsprop": {"alpha": 0.9, "eps": 1e-8, "weight_decay": 0.01},
}
FP32_WEIGHTS = ("fp32", "bf16", "fp16", "fp32,states=8bit")
LEAN = (
    "bf16-lean", "fp16-lean", "bf16-lean,master=fp32", "fp16-lean,master=fp32", "bf16-lean,states=bf16",
    "bf16-lean,states=8bit", "fp16-lean,states=8bit", "bf16-lean,master=none",
)  # fmt: skip
ILLEGAL = (
    "loss is a number", "loss is a vector", "loss without graph", "negative weight", "NaN weight", "infinite weight",
    "weight is text", "weight is a vector", "step in forward", "optimizer.step", "state of another version",
    "state without a weight", "state without an optimizer", "state with a wrong shape",
)  # fmt: skip
GAMMA = 0.8


@dataclass(frozen=True)
class Config:
    """How a run is set up. `optimizers` has (kind, learning rate, groups of parameter names) for each."""

    precision: str
    optimizers: tuple[tuple[str, float, tuple[tuple[str, ...], ...]], ...]
    accumulate: int = 1
    max_norm: float | None = None
    ema: float | None = None
    schedules: tuple[str | None, ...] = (None, None)  # of each optimizer: "exponential", "lambda" or None
    dynamic: tuple[str, int, int, int, int] | None = None  # semantics, log2 of scale, interval, hysteresis, max_skips
    batch_norm: bool = False
    tied: bool = False
    frozen: tuple[str, ...] = ()  # from the start
    seed: int = 0

    @property
    def loss_scale(self):
        """None, a number or settings, as `Scale` of the reference takes it."""
        if not self.precision.startswith("fp16"):
            return "none"
        if self.dynamic is None:
            return 1024.0
        semantics, power, interval, hysteresis, max_skips = self.dynamic
        settings = {"semantics": semantics, "init_scale": 2.0**power, "growth_interval": interval}
        return settings | {"hysteresis": hysteresis, "max_skips": max_skips, "min_scale": 1.0, "max_scale": 2.0**17}

    @property
    def text(self):
        """The policy as the Engine takes it."""
        if self.loss_scale == "none":
            return self.precision
        if self.dynamic is None:
            return f"{self.precision},loss_scale=1024"
        settings = ";".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.loss_scale.items())
        return f"{self.precision},loss_scale=dynamic({settings})"

    @property
    def is_lean(self):
        """Whether weights are stored in 16 bits."""
        return "lean" in self.precision

    @property
    def adopts(self):
        """Whether lean optimizers replace torch's."""
        return self.is_lean or self.states != "fp32"

    @property
    def master(self):
        """Where the fp32 value of a 16-bit weight is."""
        return self._key("master") or ("split" if self.is_lean else "weights")

    @property
    def states(self):
        """The format of the moments."""
        return self._key("states") or "fp32"

    def _key(self, key):
        return dict(part.split("=") for part in self.precision.split(",")[1:]).get(key)

    def stored_dtype(self, name):
        """The 16-bit dtype of a weight, or None; batch norm stays in fp32."""
        return DTYPES[self.precision[:4]] if self.is_lean and not name.startswith("batch") else None

    def narrow(self, name):
        """The 16-bit dtype in which a gradient is summed, or None."""
        return self.stored_dtype(name) if self.accumulate == 1 and "grads=fp32" not in self.precision else None

    def place_of(self, name):
        """Optimizer and group of a parameter."""
        for i, (_, _, groups) in enumerate(self.optimizers):
            for j, group in enumerate(groups):
                if name in group:
                    return i, j
        raise KeyError(name)

    def rule_of(self, name):
        """Kind and options of a parameter's optimizer."""
        kind = self.optimizers[self.place_of(name)[0]][0]
        return kind, OPTIONS[kind]

    def counts_steps(self, name):
        """Whether the optimizer of a parameter counts its steps."""
        return self.rule_of(name)[0] in {"adamw", "rmsprop"}

    @property
    def scheduled(self):
        """Indices of the optimizers that have a scheduler."""
        return [i for i in range(len(self.optimizers)) if self.schedules[i] is not None]

    def next_lr(self, optimizer, rate, applied):
        """The learning rate after `applied` updates."""
        if self.schedules[optimizer] == "exponential":
            return rate * GAMMA
        return self.optimizers[optimizer][1] * falling(applied)


def falling(applied):
    """A schedule for LambdaLR."""
    return 1 / (1 + 0.1 * applied)


def parameter_names(*, batch_norm, tied):
    """The names of the parameters of the model that is trained."""
    names = ["first.weight", "first.bias", "second.weight", "second.bias", "spare"]
    names += ["batch.weight", "batch.bias"] if batch_norm else []
    return [name for name in names if not (tied and name == "second.weight")]


# --- random runs ----------------------------------------------------------------------------------------------------


def random_config(rng, precisions=FP32_WEIGHTS + LEAN, *, batch_norm=True):
    """A set-up, with every kind of precision and optimizer."""
    precision = rng.choice(precisions)
    batch_norm, tied = batch_norm and rng.random() < 0.4, rng.random() < 0.2
    names = parameter_names(batch_norm=batch_norm, tied=tied)
    rng.shuffle(names)
    kinds = ["adamw", "sgd", "lion", "rmsprop"]
    cut = rng.randrange(1, len(names)) if rng.random() < 0.35 else len(names)
    optimizers = tuple(_random_optimizer(rng, rng.choice(kinds), part) for part in (names[:cut], names[cut:]) if part)
    semantics = rng.choice(["deepspeed", "deepspeed-consecutive", "torch", "apex", "megatron"])
    hysteresis = 1 if semantics == "torch" else rng.choice([1, 2])
    dynamic = (semantics, rng.choice([4, 10, 16]), rng.choice([1, 2, 3]), hysteresis, rng.choice([3, 100, 100]))
    return Config(
        precision,
        optimizers,
        accumulate=rng.choice([1, 1, 2, 3, 4]),
        max_norm=rng.choice([None, 0.1, 1.0, 100.0]),
        ema=rng.choice([None, 0.5, 0.9]),
        schedules=tuple(rng.choice([None, "exponential", "lambda"]) for _ in range(2)),
        dynamic=dynamic if precision.startswith("fp16") and rng.random() < 0.8 else None,
        batch_norm=batch_norm,
        tied=tied,
        frozen=("second.bias",) if batch_norm and rng.random() < 0.1 else (),
        seed=rng.randrange(1000),
    )


def _random_optimizer(rng, kind, names):
    cut = rng.randrange(1, len(names)) if len(names) > 1 and rng.random() < 0.3 else len(names)
    groups = tuple(tuple(part) for part in (names[:cut], names[cut:]) if part)
    return kind, rng.choice([0.1, 0.01, 0.003]), groups


def random_weight(rng):
    """The weight of a micro-batch: None, or the type and the number."""
    if rng.random() < 0.5:
        return None
    kind = rng.choice(["int", "float", "tensor"])
    number = rng.choice([1, 2, 3, 7, 100]) if kind == "int" else rng.choice([0.25, 1.0, 1.5, 37.0])
    odd = rng.random()
    if odd < 0.1:
        number = 0
    elif odd < 0.2:
        number = rng.choice([1e-6, 1e6]) if kind != "int" else 10**6
    elif odd < 0.25 and kind == "tensor":
        number = rng.choice(["nan", "inf", "-1"])
    return kind, number


def random_moves(rng, config, length):
    """About `length` moves, most of them micro-batches that are stepped."""
    moves = []
    while len(moves) < length:
        draw = rng.random()
        if draw < 0.55:
            moves += _random_micro_batch(rng, config)
        elif draw < 0.95:
            moves += _random_other(rng, config)
        else:
            moves.append(("illegal", {"call": rng.choice(ILLEGAL)}))
    return moves


def _random_micro_batch(rng, config):
    micro = {"seed": rng.randrange(10**6)}
    weight = random_weight(rng)
    if weight is not None:
        micro["weight"] = weight
    if rng.random() < 0.25:
        micro["losses"] = 2
    if rng.random() < 0.5:
        micro["spare"] = True
    if rng.random() < 0.12:
        micro["poison"] = rng.choice(["activation", "loss", "gradient"])
    if rng.random() < 0.2:
        micro["size"] = rng.choice([1e-3, 30.0])
    moves = [("micro_batch", micro)]
    if rng.random() < 0.12:
        moves.append(("unscale", {"edit": rng.choice([None, "halve", "inf", "clip"])}))
    if rng.random() < 0.93:
        moves.append(("step", {"last": True} if rng.random() < 0.2 or moves[-1][0] == "unscale" else {}))
    return moves


def _random_other(rng, config):
    """One of the other moves."""
    seed = rng.randrange(10**6)
    name = rng.choice([n for _, _, groups in config.optimizers for group in groups for n in group])
    pick = rng.choices(
        ["evaluate", "edit", "reload", "lr", "freeze", "forward", "fail", "tamper", "reset", "rebuild", "last", *EXTRA],
        [3, 3, 3, 2, 2, 1, 2, 1, 1, 1, 2, 2, 1, 1],
    )[0]
    if pick == "evaluate":
        options = {"seed": seed, "ema": config.ema is not None and rng.random() < 0.6}
        options |= {"saves": True} if rng.random() < 0.3 else {}
        return [("evaluate", options | ({"fails": True} if rng.random() < 0.1 else {}))]
    if pick == "edit":
        return [("edit", {"name": name, "how": rng.choice(EDITS), "seed": seed})]
    if pick == "reload":
        reload = {
            "seed": seed,
            "disk": rng.random() < 0.3,
            "precision": rng.choice([None, None, *FP32_WEIGHTS, *LEAN]),
        }
        return [("step", {"last": True}), ("reload", reload | {"shuffle": rng.random() < 0.5})]
    if pick == "lr":
        return [("set_lr", {"name": name, "value": rng.choice([0.05, 0.002])})]
    if pick == "freeze":
        return [("freeze", {"name": name, "trainable": rng.random() < 0.6})]
    if pick == "forward":
        return [("forward_only", {"seed": seed, "fails": rng.random() < 0.5})]
    if pick == "fail":
        return [("failing_backward", {"seed": seed, "where": rng.choice(["hidden", "output"])})]
    if pick == "tamper":
        return [("tamper", {"how": rng.choice(["edit", "clear", "bare backward"])})]
    if pick == "remember":
        return [("step", {"last": True}), ("remember", {})]
    if pick == "rewind":
        return [("rewind", {})]
    if pick == "optimizer":
        return [("optimizer_state", {"index": rng.randrange(2)})]
    if pick == "reset":
        return [("reset_window", {})]
    return [("rebuild", {})] if pick == "rebuild" else [("step", {"last": True})]


EXTRA = ("remember", "rewind", "optimizer")
EDITS = ("zero_", "clamp_", "copy_", "data", "load_state_dict", "mask")


def random_run(seed, precisions=FP32_WEIGHTS + LEAN, length=16):
    """The Config and the moves of a seed."""
    rng = random.Random(seed)
    config = random_config(rng, precisions)
    return config, random_moves(rng, config, length)


def random_ranks_run(seed, num_ranks=2, length=16, *, wrapped=True):
    """The Config of a seed for several ranks, and the moves of each rank: other data and weights, otherwise the same calls.

    A model that is not `wrapped` in DistributedDataParallel is also trained in lean presets, frozen and unfrozen.
    """
    rng = random.Random(seed)
    # fp32 gradients: the reference does not round the mean over ranks to 16 bits.
    plain = FP32_WEIGHTS + tuple(f"{precision},grads=fp32" for precision in LEAN)
    precisions = ("fp32", "bf16", "fp16") if wrapped else plain
    config = random_config(rng, precisions, batch_norm=False)
    excluded = {"failing_backward", "rebuild", "tamper"} | ({"freeze"} if wrapped else set())
    moves, in_micro_batch = [[] for _ in range(num_ranks)], False
    for name, options in random_moves(rng, config, length):
        if name in excluded:
            continue  # DistributedDataParallel itself does not survive an aborted backward or other trainable parameters
        odd = rng.randrange(num_ranks)  # the rank of a poison
        weights = [random_weight(rng) for _ in range(num_ranks)]
        for rank in range(num_ranks):
            own = dict(options)
            if name == "micro_batch":
                own |= {"seed": options["seed"] + rank, "spare": True}
                # Another weight for a second loss would be rejected on some ranks only, and leave the others waiting.
                own["weight"] = weights[rank] if "weight" in options and not in_micro_batch else None
                own["losses"] = options.get("losses", 1)
                if rank != odd:
                    own.pop("poison", None)
            if name == "reload" and own["precision"] not in precisions:
                own["precision"] = None
            moves[rank].append((name, own))
        in_micro_batch = name == "micro_batch" or (in_micro_batch and name != "step")
    return config, moves


def batch(seed, size=1.0, rows=4):
    """Inputs and targets of one micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator) * size, torch.randn(rows, 4, generator=generator)


def program(config, moves, runner="fuzz_driver"):
    """The run as a program: `PYTHONPATH=src:tests python program.py`; with the moves of each rank, under torchrun."""
    lines = [f"    {move!r}," for move in moves]
    return "\n".join(
        [f"from {runner} import Config, replay", "", "moves = [", *lines, "]", f"replay({config!r}, moves)"]
    )
