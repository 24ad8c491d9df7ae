"""Inject faults that the autopsy was not written with, into models that it has not met, and count what it names.

    python benchmarks/unseen_faults.py --faults 200 --seed 0            # the models of `FIRST` and most kinds of faults
    python benchmarks/unseen_faults.py --faults 200 --seed 0 --second   # other models, and kinds that the first set has not

A fault is due in one micro-batch of one step. Cause, module and micro-batch must be named, the loss scale must be blamed only
where it is to blame, and everything that the training leaves behind must be that of a run without a watch, bit for bit. A fault
without an effect on its step is drawn again.
"""

import argparse
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fault_injection import VALUES
from fault_runs import print_results, same, seed_everything, train
from foreign_faults import Ruined
from torch import Tensor, nn
from unseen_models import FIRST, SECOND, Batch, Unseen

from halfstep.engine.engine import Engine
from halfstep.scaling.scaler import LossScaler
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.skips import Autopsies

STEPS = 3
PRECISIONS = ("fp16", "bf16", "fp16-lean", "bf16-lean")
MODELS = FIRST | SECOND
ANY = "any module"


@dataclass(frozen=True)
class Fault:
    """One fault, when and where; and what the autopsy must name."""

    model: str
    precision: str
    accumulate: int
    kind: str
    step: int
    micro: int
    target: str | None
    element: int
    value: str
    cause: str
    modules: tuple[str | None, ...]


class Overflowing(torch.autograd.Function):
    """The identity, whose forward passes through a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Changed."""
        del ctx
        return change(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """As it is."""
        del ctx
        return gradient, None


class Then(nn.Module):
    """A function after a module, as a module without parameters."""

    def __init__(self, inner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.then = inner, Lambda(function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Both."""
        return self.then(self.inner(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """What the inner module has, such as its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)


class Lambda(nn.Module):
    """A function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """It."""
        return self.function(x)


# --- what happens ---------------------------------------------------------------------------------------------------


class Injector:
    """Makes a fault happen in the micro-batch that is due."""

    def __init__(self, fault: Fault, model: nn.Module) -> None:
        self.fault, self.model, self.is_due, self.num_fired = fault, model, False, 0
        self._undo = contextlib.ExitStack()
        kind, target = fault.kind, fault.target
        if kind in IN_OUTPUT:
            model.get_submodule(str(target)).register_forward_hook(self._hook)
        elif kind in {"own-code", "own-input"}:
            self._wrap(model.get_submodule(str(target)))
        elif kind == "lambda":
            parent, _, child = str(target).rpartition(".")
            inner = model.get_submodule(str(target))
            setattr(model.get_submodule(parent), child, Then(inner, lambda x: self.ruin(x) if self.is_due else x))
        elif kind == "frozen":
            model.get_parameter(str(target)).requires_grad_(requires_grad=False)
        elif kind in {"buffer-overflow", "out-variant"}:
            module = model.get_submodule(str(target))
            module.register_buffer("scratch_of_fault", torch.ones(3))
            module.register_forward_hook(self._hook)
        elif kind in {"full-hook", "pre-hook"}:
            self._hook_gradients(model.get_submodule(str(target)))
        elif kind == "post-accumulate":
            param = model.get_parameter(str(target))
            param.register_post_accumulate_grad_hook(self._ruin_grad)

    def spot(self, x: Tensor) -> Tensor:
        """Zeros, and a one at the fault's element."""
        spot = torch.zeros(x.numel(), dtype=x.dtype)
        spot[self.fault.element % x.numel()] = 1.0
        return spot.view(x.shape)

    def ruin(self, x: Tensor) -> Tensor:
        """An inf or NaN in one element, by arithmetic with finite numbers."""
        largest = self.spot(x) * torch.finfo(x.dtype).max
        if self.fault.value == "nan":
            return x + (-largest).sqrt()
        return (x.abs() + largest + largest) * (1 if self.fault.value == "inf" else -1)

    def _hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        del args
        if not self.is_due:
            return None
        self.num_fired += 1
        kind = self.fault.kind
        if kind == "once" and self.num_fired > 1:
            return None
        x = first_of(output)
        if kind == "buffer-overflow":
            with torch.no_grad():
                module.scratch_of_fault.mul_(3e38).mul_(self.spot(module.scratch_of_fault) * 4 + 1)
            return with_first(output, x + module.scratch_of_fault.sum().to(x.dtype))
        if kind == "out-variant":
            large = torch.full((3,), 3e38)
            with torch.no_grad():
                torch.add(large, large, out=module.scratch_of_fault)
            return with_first(output, x + module.scratch_of_fault.sum().to(x.dtype))
        return with_first(output, IN_OUTPUT[kind](self, x))

    def _wrap(self, module: nn.Module) -> None:
        forward, kind = module.forward, self.fault.kind

        def changed(*args: Any, **kwargs: Any) -> Any:
            if not self.is_due:
                return forward(*args, **kwargs)
            if kind == "own-code":
                output = forward(*args, **kwargs)
                return with_first(output, self.ruin(first_of(output)))
            return forward(*(self.ruin(a) if is_float(a) else a for a in args), **kwargs)

        module.forward = changed

    def _hook_gradients(self, module: nn.Module) -> None:
        def changed(gradients: Any) -> Any:
            if not self.is_due:
                return None
            return tuple(g if g is None else self.ruin(g) for g in gradients)

        if self.fault.kind == "full-hook":
            module.register_full_backward_hook(lambda _, into, __: changed(into))
        else:
            module.register_full_backward_pre_hook(lambda _, out: changed(out))

    @torch.no_grad()
    def _ruin_grad(self, param: Tensor) -> None:
        if self.is_due and param.grad is not None:
            param.grad.copy_(self.ruin(param.grad))

    @torch.no_grad()
    def arm(self, batch: Batch) -> None:
        """Start the fault."""
        fault = self.fault
        if fault.kind == "data":
            value: Any = batch
            for key in str(fault.target).split("."):
                value = value[int(key) if key.isdigit() else key]
            value.view(-1)[fault.element % value.numel()] = VALUES[fault.value]
        elif fault.kind in {"weights", "frozen", "row", "buffer"}:
            tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
            tensor = tensors[str(fault.target)]
            element = fault.element % tensor.numel()
            ids = batch.get("input_ids", batch.get("ids"))
            if fault.kind == "row" and ids is not None:
                row = int(ids.flatten()[fault.element % ids.numel()]) % len(tensor)
                element = row * tensor.shape[1] + fault.element % tensor.shape[1]
            self._undo.callback(tensor.detach().copy_, tensor.detach().clone())
            tensor.view(-1)[element] = VALUES[fault.value]

    def losses(self, losses: Any) -> Any:
        """The losses, with the fault if it is in the loop's own code."""
        kind = self.fault.kind
        if not self.is_due or kind not in IN_LOSS:
            return losses
        several = losses if isinstance(losses, list) else [losses]
        changed = IN_LOSS[kind](several[-1])
        return [*several[:-1], changed] if isinstance(losses, list) else changed

    @torch.no_grad()
    def disarm(self) -> None:
        """End it and repair everything."""
        self._undo.close()


def first_of(output: Any) -> Any:
    """The first tensor of what a module returns."""
    if isinstance(output, Tensor) or output is None:
        return output
    return next(iter(output.values() if isinstance(output, dict) else output), None) if _is_open(output) else None


def with_first(output: Any, x: Tensor) -> Any:
    """The same output with another first tensor."""
    if isinstance(output, Tensor):
        return x
    if isinstance(output, tuple | list):
        return type(output)([x, *output[1:]])
    output[next(iter(output))] = x
    return output


def _is_open(output: Any) -> bool:
    return isinstance(output, tuple | list | dict)


def is_float(value: Any) -> bool:
    """Whether it is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _view_in_place(injector: Injector, x: Tensor) -> Tensor:
    y = x.clone()
    part = y.view(-1)[injector.fault.element % y.numel() :][:1]
    part.abs_().add_(1.0).mul_(torch.finfo(x.dtype).max).mul_(2.0)
    return y


def _teacher(_: Injector, x: Tensor) -> Tensor:
    """Weights by a softmax over distances, of which one overflowed: computed without gradients."""
    with torch.no_grad():
        distances = (x.float() * 1e30).square()
        weights = distances / distances.sum()
    return x * weights.to(x.dtype)


# In a hook on a module's output: the code counts as the module's.
FORWARD: dict[str, Callable[[Injector, Tensor], Tensor]] = {
    "function-forward": lambda i, x: Overflowing.apply(x, i.ruin),
    "constant": lambda i, x: x + torch.tensor(VALUES[i.fault.value]),
    "number": lambda i, x: x * VALUES[i.fault.value],
    "empty-mean": lambda _, x: x + x[x.float().abs() > 1e30].mean(),
    "single-std": lambda _, x: x + x.flatten()[:1].std(),
    "cast": lambda i, x: x + (i.spot(x).double() * 1e300).to(x.dtype),
    "teacher": _teacher,
    "view-in-place": _view_in_place,
    "int-cast": lambda i, x: x + (i.spot(x).long() * 100_000).half().to(x.dtype),
    "fft": lambda _, x: x + (torch.fft.rfft(x.float() * 0 + 3e38).abs().sum() * 1e-38).to(x.dtype),
    "logit": lambda i, x: x + torch.logit(i.spot(x).float()).to(x.dtype),
    "index-put": lambda i, x: x.index_put((torch.zeros(1, dtype=torch.long),), (i.spot(x[:1]) * 3e38 * 10).to(x.dtype)),
}
BACKWARD: dict[str, Callable[[Injector, Tensor], Tensor]] = {
    "function-backward": lambda i, x: Ruined.apply(x, i.ruin),
    "std": lambda _, x: x + 1e-3 * (x - x.detach() + 1.0).float().std().to(x.dtype),
    "norm-power": lambda _, x: x + (x - x.detach()).float().square().sum().pow(0.5).to(x.dtype),
    "acos": lambda _, x: x + 1e-3 * torch.acos((x - x.detach() + 1.0).float()).to(x.dtype),
    "cdist": lambda _, x: x + (x - x.detach()).float().flatten()[:4].abs().pow(0.3).sum().to(x.dtype),
    "atan2": lambda _, x: x + torch.atan2((x - x.detach()).float(), (x - x.detach()).float()).to(x.dtype),
}
IN_OUTPUT = {**FORWARD, **BACKWARD, "once": Injector.ruin}


def _ignored(loss: Tensor) -> Tensor:
    return loss + F.cross_entropy(loss.expand(2, 3), torch.full((2,), -100))


def _degenerate(loss: Tensor) -> Tensor:
    return loss + 1e-3 * torch.linalg.eigh(torch.eye(3) * loss.float())[1].sum()


LOSS_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "loss-ignored": _ignored,
    "loss-log": lambda loss: loss - (loss.detach() * 0).log() * loss,
    "loss-ratio": lambda loss: loss / (loss.detach() - loss.detach()),
    "loss-power": lambda loss: loss + (loss.float() + 1) * torch.tensor(10.0).pow(torch.tensor(39.0)),
}
LOSS_BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "loss-eigh": _degenerate,
    "loss-norm": lambda loss: loss + (loss * 0).float().pow(2).sqrt(),
}
LOSS_DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "loss-target": lambda loss: F.mse_loss(loss.float().expand(2), torch.tensor([0.0, float("nan")])) + loss,
    "loss-numpy": lambda loss: loss * torch.from_numpy(np.array([1.0, np.inf], dtype=np.float32)).mean(),
}
LOSS_SCALE: dict[str, Callable[[Tensor], Tensor]] = {"loss-scale": lambda loss: loss * 3e4}
IN_LOSS = LOSS_FORWARD | LOSS_BACKWARD | LOSS_DATA | LOSS_SCALE

OTHERS = (
    "own-code",
    "own-input",
    "buffer-overflow",
    "full-hook",
    "pre-hook",
    "data",
    "weights",
    "frozen",
    "row",
    "buffer",
)
KEPT_ASIDE = (
    *("view-in-place", "int-cast", "fft", "logit", "index-put", "cdist", "atan2", "norm-power"),
    *("loss-eigh", "loss-norm", "loss-ratio", "loss-numpy", "lambda", "out-variant", "post-accumulate"),
)
KINDS = tuple(k for k in (*IN_OUTPUT, *IN_LOSS, *OTHERS) if k not in KEPT_ASIDE)


# --- where ----------------------------------------------------------------------------------------------------------


def draw(rng: random.Random, *, second: bool) -> Fault | None:
    """A fault at random; None if its model has no place for it."""
    name = rng.choice(sorted(SECOND if second else FIRST))
    kind = rng.choice((*KINDS, *KEPT_ASIDE) if second else KINDS)
    precision = rng.choice([p for p in PRECISIONS if kind not in LOSS_SCALE or p.startswith("fp16")])
    accumulate = rng.choice((1, 1, 2, 3))
    fault = Fault(
        name,
        precision,
        accumulate,
        kind,
        rng.randrange(STEPS - 1),
        rng.randrange(accumulate),
        None,
        rng.randrange(10**6),
        rng.choice(sorted(VALUES)),
        "forward",
        (None,),
    )
    spec = MODELS[name]
    torch.manual_seed(0)
    model = spec.build()
    if kind in IN_LOSS:
        cause = "data" if kind in LOSS_DATA else "forward" if kind in LOSS_FORWARD else "backward"
        return replace(fault, cause=cause, modules=(ANY,) if kind in LOSS_SCALE else (None,))
    if kind == "data":
        if not spec.entries:
            return None
        target = rng.choice(sorted(spec.entries))
        return replace(fault, target=target, cause="data", modules=spec.entries[target])
    if kind in {"weights", "frozen", "row", "buffer", "post-accumulate"}:
        return _place_in_tensor(fault, model, rng)
    names = called(model, spec, leaves=kind in {"lambda", "full-hook", "pre-hook"})
    if kind == "own-input":
        names = [n for n in names if n]
    if kind == "lambda":
        names = [n for n in names if isinstance(model.get_submodule(n), nn.Linear | nn.LayerNorm | nn.Conv2d | nn.GELU)]
    if not names:
        return None
    target = rng.choice(names)
    if kind == "once":
        return replace(fault, target=target, cause="not reproduced")
    cause = "backward" if kind in BACKWARD or kind in {"full-hook", "pre-hook"} else "forward"
    return replace(fault, target=target, cause=cause, modules=(f"{target}.then" if kind == "lambda" else target,))


def _place_in_tensor(fault: Fault, model: nn.Module, rng: random.Random) -> Fault | None:
    tensors = dict(model.named_buffers() if fault.kind == "buffer" else model.named_parameters())
    tensors = {n: t for n, t in tensors.items() if t.is_floating_point()}
    if fault.kind == "row":
        tensors = {
            n: t for n, t in tensors.items() if isinstance(model.get_submodule(n.rpartition(".")[0]), nn.Embedding)
        }
    if fault.kind in {"frozen", "post-accumulate"}:
        tensors = {n: t for n, t in tensors.items() if t.requires_grad}
    if fault.kind == "frozen" and len(tensors) < 2:
        return None
    if not tensors:
        return None
    target = rng.choice(sorted(tensors))
    tables = ((n, [*m.parameters(recurse=False), *m.buffers(recurse=False)]) for n, m in model.named_modules())
    owners = tuple(name for name, own in tables if any(each is tensors[target] for each in own))
    return replace(
        fault, target=target, cause="backward" if fault.kind == "post-accumulate" else "weights", modules=owners
    )


def called(model: nn.Module, spec: Unseen, *, leaves: bool) -> list[str]:
    """The modules that run and whose first result is a tensor of floating-point numbers."""
    names: list[str] = []
    for name, module in model.named_modules():
        if "parametrizations" in name or (
            leaves and (list(module.children()) or isinstance(module, nn.Identity | nn.Dropout))
        ):
            continue

        def hook(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            if is_float(first_of(output)) and name not in names:
                names.append(name)

        module.register_forward_hook(hook)
    spec.loss(model, spec.draw(torch.Generator().manual_seed(0)))
    for module in model.modules():
        module._forward_hooks.clear()  # noqa: SLF001 - a model of this function's own
    return names


# --- a run ----------------------------------------------------------------------------------------------------------


def run_fault(
    fault: Fault, watch: Autopsies | None, *, seed: int = 0, scale: float = 2.0**6
) -> tuple[list[bool], list[Any]]:
    """Train with the fault; returns which steps were skipped, and everything that the training left behind."""
    seed_everything(seed)
    spec = MODELS[fault.model]
    model = spec.build().train()
    injector = Injector(fault, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scaler = LossScaler(init_scale=scale) if fault.precision.startswith("fp16") else None
    engine = Engine(
        model,
        optimizer,
        fault.precision,
        accumulate=fault.accumulate,
        max_norm=1.0,
        ema=0.9,
        watch=watch,
        scaler=scaler,
    )
    g = torch.Generator().manual_seed(seed + 1)
    return train(
        engine,
        model,
        injector,
        lambda: spec.draw(g),
        lambda batch: injector.losses(spec.loss(model, batch)),
        steps=STEPS,
        accumulate=fault.accumulate,
        at=(fault.step, fault.micro),
        watched=watch is not None,
    )


@dataclass(frozen=True)
class Outcome:
    """What the autopsy named, and whether training was undisturbed."""

    fault: Fault
    autopsy: Autopsy
    undisturbed: bool

    @property
    def right(self) -> bool:
        """Whether cause, module and micro-batch are the fault's, and the scale is blamed only where it is to blame."""
        fault, autopsy = self.fault, self.autopsy
        by_scale = fault.cause != "backward" or bool(autopsy.at_scale_1) == (fault.kind in LOSS_SCALE)
        in_place = fault.modules == (ANY,) or autopsy.module in fault.modules
        first = 0 if fault.kind in {"weights", "frozen", "row"} else fault.micro
        in_micro = fault.cause == "not reproduced" or fault.micro >= autopsy.window_index >= first
        return autopsy.cause == fault.cause and in_place and by_scale and in_micro


def outcomes(num: int, seed: int, *, second: bool = False, only: str = "") -> Iterator[Outcome]:
    """`num` faults that had an effect on their step."""
    rng = random.Random(seed)
    done = 0
    while done < num:
        fault = draw(rng, second=second)
        if fault is None or only not in (fault.kind, fault.model, ""):
            continue
        watch = Autopsies()
        try:
            skipped, left = run_fault(fault, watch)
        except (RuntimeError, KeyError):  # code that vmap rejects, or names that a wrapper changed
            if not _fails_without_watch(fault):
                raise
            print(f"not counted, fails with and without a watch: {fault}", flush=True)
            continue
        if not watch.autopsies or skipped.count(True) != 1 or not skipped[fault.step]:
            continue
        if fault.kind in LOSS_SCALE and run_fault(fault, None, scale=1.0)[0][fault.step]:
            continue  # it overflows without a scale, too
        done += 1
        yield Outcome(fault, watch.autopsies[0], same(left, run_fault(fault, None)[1]))


def _fails_without_watch(fault: Fault) -> bool:
    try:
        run_fault(fault, None)
    except (RuntimeError, KeyError):
        return True
    return False


def main() -> int:
    """Run the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--second", action="store_true", help="the models and kinds that were kept aside")
    parser.add_argument("--only", default="", help="one model or kind of fault")
    parser.add_argument("--show", action="store_true", help="print every autopsy")
    options = parser.parse_args()
    results = outcomes(options.faults, options.seed, second=options.second, only=options.only)
    print_results(results, lambda f: (f.cause, f.kind, f.model, f.precision), show=options.show)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
