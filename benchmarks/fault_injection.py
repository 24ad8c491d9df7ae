"""Inject faults into training runs and count how often the autopsy names the right module and cause.

    python benchmarks/fault_injection.py --faults 200 --seed 0
    python benchmarks/fault_injection.py --faults 100 --compiled --backend aot_eager

Each fault is drawn at random: the model, precision, eager or compiled, accumulation, the step, and one of five causes at a random
module and element. A run with the fault and the autopsy is compared, bit for bit, with one without a watch: weights, buffers,
optimizer and scaler state, losses and random-number state afterwards must be equal. A fault that has no effect (a NaN in an unused
row of an embedding) is drawn again.
"""

import argparse
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from fault_models import MODELS
from fault_runs import same
from torch import nn

from halfstep.engine import compiling
from halfstep.engine.engine import Engine
from halfstep.scaling.scaler import LossScaler
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.skips import Autopsies

CAUSES = ("data", "weights", "forward", "backward", "not reproduced")
PRECISIONS = ("fp16", "bf16", "fp16-lean", "bf16-lean")
STEPS = 3
VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@dataclass(frozen=True)
class Fault:
    """One fault: what, where and when."""

    model: str
    precision: str
    compiled: bool
    accumulate: int
    step: int  # from 0
    cause: str
    target: str | None  # a module, parameter or tensor of the batch
    element: int
    value: str
    kind: str = ""  # of a backward fault: "function", "hook" or "scale"

    @property
    def module(self) -> str | None:
        """The module that the autopsy must name."""
        if self.cause == "data":
            return MODELS[self.model].entries[str(self.target)]
        if self.cause == "weights":
            return str(self.target).rpartition(".")[0]
        return None if self.cause == "not reproduced" else self.target


def draw_fault(rng: random.Random, *, compiled: bool | None = None) -> Fault:
    """A fault at random."""
    model, cause = rng.choice(sorted(MODELS)), rng.choice(CAUSES)
    fault = Fault(
        model,
        rng.choice(PRECISIONS),
        rng.random() < 0.25 if compiled is None else compiled,
        rng.choice((1, 1, 2)),
        rng.randrange(STEPS),
        cause,
        None,
        rng.randrange(10**6),
        rng.choice(sorted(VALUES)),
    )
    net = MODELS[model].build()
    if cause == "data":
        return replace(fault, target=rng.choice(sorted(MODELS[model].entries)))
    if cause == "weights":
        return replace(fault, target=rng.choice([name for name, _ in net.named_parameters()]))
    kind = "function"
    if cause == "backward":
        kinds = ["function"] + ["hook"] * (not fault.compiled) + ["scale"] * fault.precision.startswith("fp16")
        kind = rng.choice(kinds)
    if kind == "scale":  # relative to the gradients of an earlier step
        fault = replace(fault, step=max(1, fault.step))
    names = [n for n, m in net.named_modules() if not isinstance(m, nn.ModuleList) and (kind != "hook" or _is_leaf(m))]
    return replace(fault, target=rng.choice(names), kind=kind)


def _is_leaf(module: nn.Module) -> bool:
    """Whether its output is a tensor of its own, so that a hook on it belongs to this module and no other."""
    return not list(module.children()) and not isinstance(module, nn.Identity | nn.Dropout)


class _Multiplied(torch.autograd.Function):
    """The identity, whose gradient passes through the injector."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, injector: Any) -> torch.Tensor:
        ctx.injector = injector
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.injector.ruin_gradient(gradient), None


class Injector:
    """Makes the fault happen while `armed`."""

    def __init__(self, fault: Fault, model: nn.Module) -> None:
        self.fault, self.model = fault, model
        self.armed = False
        self.num_fired = 0
        self.largest = 0.0  # gradient at the target so far
        if fault.cause in {"forward", "backward", "not reproduced"}:
            model.get_submodule(str(fault.target)).register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        if self.fault.cause == "backward":
            if self.fault.kind == "hook":
                if first.requires_grad and self.armed:
                    first.register_hook(self.ruin_gradient)
            elif self.armed or self.fault.kind == "scale":
                first = _Multiplied.apply(first, self)
        elif self.armed and (self.fault.cause == "forward" or self._first_time()):
            first = self._ruin(first)
        return first if rest is None else (first, *rest)

    def _first_time(self) -> bool:
        self.num_fired += 1
        return self.num_fired == 1

    def _ruin(self, x: torch.Tensor) -> torch.Tensor:
        """An inf or NaN in one element, by arithmetic with finite numbers."""
        spot = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
        spot[self.fault.element % x.numel()] = torch.finfo(x.dtype).max
        spot = spot.view(x.shape)
        if self.fault.value == "nan":
            return x + (-spot).sqrt()
        return (x.abs() + spot + spot) * (1 if self.fault.value == "inf" else -1)

    def ruin_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient with the fault in it, if it is due."""
        if self.fault.kind != "scale":
            return self._ruin(gradient)
        if gradient.dtype is not torch.float16:  # then another module would overflow
            return gradient
        if not self.armed:
            self.largest = max(self.largest, float(gradient.abs().max()))
            return gradient
        # Beyond the format at this scale, far inside it without one.
        factor = 4 * torch.finfo(gradient.dtype).max / max(self.largest, 1e-6)
        return (gradient.float() * factor).to(gradient.dtype)

    @torch.no_grad()
    def arm(self, batch: dict[str, torch.Tensor]) -> None:
        """Start the fault."""
        self.armed = True
        if self.fault.cause == "data":
            self._poison(batch[str(self.fault.target)])
        elif self.fault.cause == "weights":
            self._weight = self.model.get_parameter(str(self.fault.target))
            self._before = self._weight.clone()
            self._poison(self._weight)

    @torch.no_grad()
    def disarm(self) -> None:
        """End it, and repair the weight."""
        self.armed = False
        if self.fault.cause == "weights":
            self._weight.copy_(self._before)

    def _poison(self, tensor: torch.Tensor) -> None:
        tensor.view(-1)[self.fault.element % tensor.numel()] = VALUES[self.fault.value]


def run_fault(fault: Fault, watch: Autopsies | None, *, seed: int = 0) -> tuple[list[bool], list[Any]]:
    """Train with the fault; returns which steps were skipped, and everything that the training left behind."""
    torch.manual_seed(seed)
    spec = MODELS[fault.model]
    model = spec.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    injector = Injector(fault, model)
    engine = Engine(
        model,
        optimizer,
        fault.precision,
        accumulate=fault.accumulate,
        compile=fault.compiled,
        ema=0.9,
        watch=watch,
        # At 65536 these models overflow by themselves now and then.
        scaler=LossScaler(init_scale=2.0**10) if fault.precision.startswith("fp16") else None,
    )
    g = torch.Generator().manual_seed(seed + 1)
    skipped, left = [], []
    for step in range(STEPS + 1):
        for micro in range(fault.accumulate):
            batch = spec.draw(g)
            if step == fault.step and micro == 0:
                injector.arm(batch)

            def compute(batch: dict[str, torch.Tensor] = batch) -> torch.Tensor:
                return spec.loss(model, batch)

            with engine.forward():
                loss = compute()
            engine.backward(loss)
            left.append(loss.detach().clone())
            result = engine.step(replay=None if watch is None else compute)
        skipped.append(result.skipped)
        if step == fault.step:
            injector.disarm()
    state = engine.state_dict()
    state.pop("truth")  # it differs between code that was compiled and code from the compiler's cache
    left += [state, torch.get_rng_state(), model.state_dict(), dict(model.named_buffers())]
    engine.close()
    torch._dynamo.reset()  # noqa: SLF001 - as torch's own documentation calls it
    return skipped, left


@dataclass(frozen=True)
class Outcome:
    """What the autopsy named, and whether training was undisturbed."""

    fault: Fault
    autopsy: Autopsy
    undisturbed: bool

    @property
    def right(self) -> bool:
        """Whether module and cause are the fault's, and the scale is blamed only where it is to blame."""
        by_scale = self.fault.cause != "backward" or bool(self.autopsy.at_scale_1) == (self.fault.kind == "scale")
        return self.autopsy.cause == self.fault.cause and self.autopsy.module == self.fault.module and by_scale


def outcomes(num: int, seed: int, *, compiled: bool | None = None, compare: bool = True) -> Iterator[Outcome]:
    """`num` faults that had an effect."""
    rng = random.Random(seed)
    done = 0
    while done < num:
        fault = draw_fault(rng, compiled=compiled)
        watch = Autopsies()
        try:
            skipped, left = run_fault(fault, watch)
        except RuntimeError:  # of torch's compiler
            if not fault.compiled or not _fails_without_watch(fault):
                raise
            print(f"not counted, torch.compile fails with and without a watch: {fault}", flush=True)
            continue
        if not watch.autopsies or skipped.count(True) != 1 or not skipped[fault.step]:
            continue
        done += 1
        undisturbed = not compare or same(left, run_fault(fault, None)[1])
        yield Outcome(fault, watch.autopsies[0], undisturbed)


def _fails_without_watch(fault: Fault) -> bool:
    torch._dynamo.reset()  # noqa: SLF001
    try:
        run_fault(fault, None)
    except RuntimeError:
        return True
    return False


def compile_with(backend: str) -> None:
    """Let compiled models use another backend of torch.compile than inductor; "aot_eager" compiles faster."""
    compiling._options = lambda *_: {"backend": backend}  # noqa: SLF001


def _which(options: argparse.Namespace) -> bool | None:
    return False if options.eager else True if options.compiled else None


def main() -> int:
    """Run the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="no compiled models")
    parser.add_argument("--compiled", action="store_true", help="only compiled models")
    parser.add_argument("--backend", default="inductor", help="of torch.compile, e.g. aot_eager")
    options = parser.parse_args()
    if options.backend != "inductor":
        compile_with(options.backend)
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    table: dict[str, Counter[str]] = {}
    for outcome in outcomes(options.faults, options.seed, compiled=_which(options)):
        fault, autopsy = outcome.fault, outcome.autopsy
        for row in ("all", fault.cause, fault.model, fault.precision, "compiled" if fault.compiled else "eager"):
            table.setdefault(row, Counter()).update(
                faults=1, right=outcome.right, undisturbed=outcome.undisturbed, milliseconds=int(1000 * autopsy.seconds)
            )
        if not outcome.right or not outcome.undisturbed:
            print(
                f"{fault}\n  named {autopsy.cause} in {autopsy.module!r}, undisturbed={outcome.undisturbed}: {autopsy.sentence}",
                flush=True,
            )
    for row, counts in table.items():
        share = counts["right"] / counts["faults"]
        print(
            f"{row:16} {counts['faults']:4} faults  {counts['right']:4} right ({share:.1%})  "
            f"{counts['undisturbed']:4} undisturbed  {counts['milliseconds'] / counts['faults']:6.0f} ms"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
