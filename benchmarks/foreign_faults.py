"""Inject faults into models of transformers, in loops with many settings, and count what the autopsy names.

    python benchmarks/foreign_faults.py --faults 200 --seed 0
    python benchmarks/foreign_faults.py --faults 40 --backend inductor

`fault_injection.py` does this with models of our own and five kinds of faults; here are thirteen foreign models, twenty kinds, four
presets, accumulation, clipping, both kinds of activation checkpointing, frozen and low-rank parts, masks with -inf that are no
fault, and compiled models. A fault that has no effect on a step is drawn again.
"""

import argparse
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from fault_injection import VALUES
from fault_runs import print_results, same, seed_everything, train
from foreign_models import FOREIGN, LENGTH, Batch
from torch import Tensor, nn

from halfstep.engine import compiling
from halfstep.engine.engine import Engine
from halfstep.scaling.scaler import LossScaler
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.skips import Autopsies

STEPS = 3
ANY = "any module"  # where the fault has no place of its own


@dataclass(frozen=True)
class Setting:
    """The run around a fault."""

    model: str
    precision: str
    attention: str
    accumulate: int
    max_norm: float | None
    checkpoints: str  # "none", "plain" or "reentrant"
    frozen: str  # "none", "embeddings" or "low-rank"
    mask: bool  # with -inf
    backend: str | None  # of torch.compile


@dataclass(frozen=True)
class Fault:
    """One fault, when and where; and what the autopsy must name."""

    setting: Setting
    kind: str
    step: int
    micro: int
    target: str | None
    element: int
    value: str
    cause: str
    modules: tuple[str | None, ...]  # any of them
    by_scale: bool | None = None  # of a backward fault: whether the loss scale is to blame


class LowRank(nn.Module):
    """A frozen layer and a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        """The frozen one; some models ask for its dtype."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        return self.base(x) + self.up(self.down(x))


class Ruined(torch.autograd.Function):
    """The identity, whose gradient is passed through a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """A copy."""
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Its gradient, changed."""
        return ctx.change(gradient), None


def build(setting: Setting) -> nn.Module:
    """The model with its settings."""
    model = FOREIGN[setting.model].build(setting.attention)
    if setting.frozen == "embeddings":
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.requires_grad_(requires_grad=False)
    if setting.frozen == "low-rank":
        linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layer" in n]
        model.requires_grad_(requires_grad=not linears)
        for name, linear in linears:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LowRank(linear))
    model.train()
    if setting.checkpoints != "none":
        model.gradient_checkpointing_enable({"use_reentrant": setting.checkpoints == "reentrant"})
    return model


# --- kinds of faults ------------------------------------------------------------------------------------------------

IN_MODULE = ("output", "exp", "sqrt", "function", "tensor-hook", "where-log", "masked-row", "once")
IN_LOSS = ("log", "masked-mean", "sqrt-loss", "overflow-loss")
OTHERS = ("data", "weights", "row", "buffer", "norm", "parameter-hook")
IN_FP16 = ("scores", "residual", "einsum", "scale")
KINDS = (*IN_MODULE, *IN_LOSS, *OTHERS, *IN_FP16)
BACKWARD = ("sqrt", "function", "tensor-hook", "parameter-hook", "sqrt-loss", "scale")


def draw(rng: random.Random, backends: tuple[str | None, ...]) -> Fault | None:
    """A fault at random; None if this model has no place for its kind."""
    name = rng.choice(sorted(FOREIGN))
    spec, kind = FOREIGN[name], rng.choice(KINDS)
    precisions = [p for p in ("fp16", "bf16", "fp16-lean", "bf16-lean") if kind not in IN_FP16 or p.startswith("fp16")]
    precision = "fp16-lean" if kind == "residual" else rng.choice(precisions)
    attention = "eager" if kind == "scores" else rng.choice(spec.attentions)
    accumulate = rng.choice((1, 1, 3))
    setting = Setting(
        name,
        precision,
        attention,
        accumulate,
        rng.choice((None, 1.0)),
        "none",
        rng.choice(("none", "none", "embeddings", "low-rank")),
        spec.masks and rng.random() < 0.5,
        rng.choice(backends),
    )
    model = build(setting)
    # A re-entrant checkpoint has no gradient unless one of its inputs has, and no second backward pass.
    reentrant = setting.frozen == "none" and name != "gpt2"
    checkpoints = rng.choice(("none", "none", "plain", "reentrant" if reentrant else "plain"))
    if checkpoints != "none" and model.supports_gradient_checkpointing and setting.backend is None:
        setting = replace(setting, checkpoints=checkpoints)
    fault = Fault(
        setting,
        kind,
        rng.randrange(STEPS - 1),
        rng.randrange(accumulate),
        None,
        rng.randrange(10**6),
        rng.choice(sorted(VALUES)),
        "backward" if kind in BACKWARD else "forward",
        (None,),
        (kind == "scale") if kind in BACKWARD else None,
    )
    return _PLACES.get(kind, _place_in_module)(fault, model, rng)


def _place_in_module(fault: Fault, model: nn.Module, rng: random.Random) -> Fault | None:
    names = [n for n, m in _called(model, fault) if fault.kind != "tensor-hook" or _makes_its_output(m)]
    name = rng.choice(names)
    cause = "not reproduced" if fault.kind == "once" else fault.cause
    return replace(fault, target=name, cause=cause, modules=(None if fault.kind == "once" else name,))


def _called(model: nn.Module, fault: Fault) -> list[tuple[str, nn.Module]]:
    """The modules that run and give a tensor of floating-point numbers."""
    called, handles = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or "parametrizations" in name:
            continue

        def hook(module: nn.Module, _: Any, output: Any, name: str = name) -> None:
            first = _first(output)
            if isinstance(first, Tensor) and first.is_floating_point():
                called.append((name, module))

        handles.append(module.register_forward_hook(hook))
    with torch.no_grad():
        FOREIGN[fault.setting.model].loss(model, FOREIGN[fault.setting.model].draw(torch.Generator().manual_seed(0)))
    for handle in handles:
        handle.remove()
    return list(dict.fromkeys(called))


def _makes_its_output(module: nn.Module) -> bool:
    return (
        not list(module.children())
        and not isinstance(module, nn.Identity | nn.Dropout)
        and "DropPath" not in type(module).__name__
    )


def _place_in_loss(fault: Fault, model: nn.Module, rng: random.Random) -> Fault | None:
    del model, rng
    return fault


def _place_data(fault: Fault, model: nn.Module, rng: random.Random) -> Fault | None:
    del model
    entries = FOREIGN[fault.setting.model].entries
    if not entries:
        return None
    target = rng.choice(sorted(entries))
    return replace(fault, target=target, cause="data", modules=(entries[target],))


def _owners(model: nn.Module, tensor: Tensor) -> tuple[str, ...]:
    tables = ((n, [*m.parameters(recurse=False), *m.buffers(recurse=False)]) for n, m in model.named_modules())
    return tuple(name for name, own in tables if any(each is tensor for each in own))


def _place_weight(fault: Fault, model: nn.Module, rng: random.Random) -> Fault | None:
    params = dict(model.named_parameters())
    if fault.kind == "row":
        names = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
        params = {n: p for n, p in params.items() if n in names}
    if fault.kind == "buffer":
        params = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        # A replay starts from the buffers at the start of the window; what the loop writes into one later is not in it.
        fault = replace(fault, micro=0)
    if fault.kind == "parameter-hook":
        params = {n: p for n, p in params.items() if p.requires_grad}
    if not params:
        return None
    target = rng.choice(sorted(params))
    cause = fault.cause if fault.kind == "parameter-hook" else "weights"
    return replace(fault, target=target, cause=cause, modules=_owners(model, params[target]))


def _place_norm(fault: Fault, model: nn.Module, rng: random.Random) -> Fault | None:
    norms = [
        n
        for n, m in _called(model, fault)
        if "Norm" in type(m).__name__ and _eps(m) and "Batch" not in type(m).__name__
    ]
    if not norms:
        return None
    name = rng.choice(norms)
    return replace(fault, target=name, modules=(name,))


def _place_scores(fault: Fault, model: nn.Module, rng: random.Random) -> Fault | None:
    del model
    scores = FOREIGN[fault.setting.model].scores
    if not scores:
        return None
    name = rng.choice(sorted(scores))
    return replace(fault, target=name, modules=(name,))


def _place_residual(fault: Fault, model: nn.Module, rng: random.Random) -> Fault | None:
    del model
    residuals = FOREIGN[fault.setting.model].residuals
    if not residuals:
        return None
    name = rng.choice(sorted(residuals))
    return replace(fault, target=name, modules=(name,))


def _place_scale(fault: Fault, model: nn.Module, rng: random.Random) -> Fault | None:
    del model, rng
    return replace(fault, modules=(ANY,), step=0, micro=0)


_PLACES: dict[str, Callable[[Fault, nn.Module, random.Random], Fault | None]] = {
    **dict.fromkeys(IN_LOSS, _place_in_loss),
    **dict.fromkeys(("weights", "row", "buffer", "parameter-hook"), _place_weight),
    "data": _place_data,
    "norm": _place_norm,
    "scores": _place_scores,
    "residual": _place_residual,
    "scale": _place_scale,
}


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _eps(module: nn.Module) -> str:
    return next((n for n in ("eps", "variance_epsilon") if isinstance(getattr(module, n, None), float)), "")


class Injector:
    """Makes a fault happen from `arm` to `disarm`, in the micro-batch that is due."""

    def __init__(self, fault: Fault, model: nn.Module) -> None:
        self.fault, self.model = fault, model
        self.is_due, self.num_fired = False, 0
        self._undo = contextlib.ExitStack()

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

    def change_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook for the kinds that act in one module."""
        del module, args
        if not self.is_due:
            return None
        x = _first(output)
        self.num_fired += 1
        kind = self.fault.kind
        if kind == "tensor-hook":
            if x.requires_grad:
                x.register_hook(self.ruin)
            return None
        if kind == "once" and self.num_fired > 1:
            return None
        changed = _CHANGES[kind](self, x)
        if isinstance(output, tuple):
            return (changed, *output[1:])
        return changed

    @torch.no_grad()
    def arm(self, batch: Batch) -> None:
        """Start the fault."""
        fault, undo = self.fault, self._undo
        if fault.kind in {*IN_MODULE, "einsum"}:
            undo.callback(self.model.get_submodule(str(fault.target)).register_forward_hook(self.change_output).remove)
        elif fault.kind == "data":
            batch[str(fault.target)].view(-1)[fault.element % batch[str(fault.target)].numel()] = VALUES[fault.value]
        elif fault.kind in {"weights", "row", "buffer"}:
            self._poison(fault, batch)
        elif fault.kind == "parameter-hook":
            undo.callback(self.model.get_parameter(str(fault.target)).register_hook(self.ruin).remove)
        elif fault.kind == "norm":
            module = self.model.get_submodule(str(fault.target))
            name = _eps(module)
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, 0.0)
            undo.callback(module.register_forward_pre_hook(lambda _, args: (args[0] * 0, *args[1:])).remove)
        elif fault.kind == "scores":
            for name in FOREIGN[fault.setting.model].scores[str(fault.target)]:
                module = self.model.get_submodule(name)
                undo.callback(module.register_forward_hook(lambda _, __, out: out * (3e3 / out.abs().max())).remove)
        elif fault.kind == "residual":
            block, inner = str(fault.target), FOREIGN[fault.setting.model].residuals[str(fault.target)]

            def large(x: Tensor) -> Tensor:
                return torch.where(self.spot(x) > 0, torch.full_like(x, 5e4), x)

            hook = self.model.get_submodule(block).register_forward_pre_hook
            undo.callback(hook(lambda _, args: (large(args[0]), *args[1:])).remove)
            hook = self.model.get_submodule(inner).register_forward_hook
            undo.callback(hook(lambda _, __, out: (large(_first(out)), *out[1:])).remove)

    def _poison(self, fault: Fault, batch: Batch) -> None:
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        tensor = tensors[str(fault.target)]
        element = fault.element % tensor.numel()
        if fault.kind == "row" and "input_ids" in batch:  # one that this batch uses
            ids = batch["input_ids"].flatten()
            row = int(ids[fault.element % len(ids)]) % len(tensor)
            element = row * tensor.shape[1] + fault.element % tensor.shape[1]
        self._undo.callback(tensor.detach().copy_, tensor.detach().clone())
        tensor.view(-1)[element] = VALUES[fault.value]

    def loss(self, losses: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        """The losses, with the fault if it is one of the loop's own terms."""
        if not self.is_due or self.fault.kind not in IN_LOSS:
            return losses
        first = losses[0] if isinstance(losses, list) else losses
        term = _TERMS[self.fault.kind](first)
        return [*losses[:-1], losses[-1] + term] if isinstance(losses, list) else losses + term

    @torch.no_grad()
    def disarm(self) -> None:
        """End it and repair everything."""
        self._undo.close()


def _masked_row(_: Injector, x: Tensor) -> Tensor:
    """Attention to nothing at all."""
    blocked = torch.zeros(x.shape, dtype=torch.bool)
    blocked.view(-1, x.shape[-1])[0] = True
    return x + torch.softmax(x.masked_fill(blocked, -torch.inf), -1)


_CHANGES: dict[str, Callable[[Injector, Tensor], Tensor]] = {
    "output": Injector.ruin,
    "once": Injector.ruin,
    "exp": lambda i, x: x + torch.exp(i.spot(x) * 1e5),
    "einsum": lambda _, x: x + torch.einsum("...i,...j->...", (x * 0 + 300).half(), (x * 0 + 300).half()).unsqueeze(-1),
    "sqrt": lambda _, x: x + (x - x.detach()).abs().sqrt(),
    "function": lambda i, x: Ruined.apply(x, i.ruin),
    "where-log": lambda i, x: (
        x + torch.where(i.spot(x) > 0, 0.0, (x * (1 - i.spot(x)) + (1 - i.spot(x)) * 1e3).log()).to(x.dtype) * 1e-3
    ),
    "masked-row": _masked_row,
}
_TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "log": lambda loss: -(loss * 0).log(),
    "masked-mean": lambda loss: (loss * torch.zeros(3)).sum() / torch.zeros(3).sum(),
    "sqrt-loss": lambda loss: (loss * 0).sqrt(),
    "overflow-loss": lambda loss: loss.float() * 3e38 * 10,
}


# --- a run ----------------------------------------------------------------------------------------------------------


def _with_mask(setting: Setting, batch: Batch) -> Batch:
    """A causal mask of -inf, as some data loaders make it."""
    if not setting.mask:
        return batch
    some = batch.get("input_ids", batch.get("inputs_embeds"))
    assert some is not None
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1).expand(len(some), 1, -1, -1).clone()
    return batch | {"attention_mask": mask}


def run_fault(
    fault: Fault, watch: Autopsies | None, *, seed: int = 0, scale: float | None = None
) -> tuple[list[bool], list[Any]]:
    """Train with the fault; returns which steps were skipped, and everything that the training left behind."""
    seed_everything(seed)
    setting, spec = fault.setting, FOREIGN[fault.setting.model]
    model = build(setting)
    injector = Injector(fault, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    init = scale or (2.0**24 if fault.kind == "scale" else 2.0**6)
    scaler = LossScaler(init_scale=init) if setting.precision.startswith("fp16") else None
    with _compiled_by(setting.backend):
        engine = Engine(
            model,
            optimizer,
            setting.precision,
            accumulate=setting.accumulate,
            max_norm=setting.max_norm,
            compile=setting.backend is not None,
            ema=0.9,
            watch=watch,
            scaler=scaler,
        )
    g = torch.Generator().manual_seed(seed + 1)
    return train(
        engine,
        model,
        injector,
        lambda: _with_mask(setting, spec.draw(g)),
        lambda batch: injector.loss(spec.loss(model, batch)),
        steps=STEPS,
        accumulate=setting.accumulate,
        at=(fault.step, fault.micro),
        watched=watch is not None,
    )


@contextlib.contextmanager
def _compiled_by(backend: str | None) -> Iterator[None]:
    """Let an Engine compile by this backend, with nothing left of earlier compilations."""
    if backend is not None:
        torch._dynamo.reset()  # noqa: SLF001
    options = compiling._options  # noqa: SLF001
    if backend not in {None, "inductor"}:
        compiling._options = lambda *_: {"backend": backend}  # noqa: SLF001
    try:
        yield
    finally:
        compiling._options = options  # noqa: SLF001


@dataclass(frozen=True)
class Outcome:
    """What the autopsy named, and whether training was undisturbed."""

    fault: Fault
    autopsy: Autopsy
    undisturbed: bool
    fits: bool = True  # the scale that the autopsy estimates

    @property
    def right(self) -> bool:
        """Whether cause and module are the fault's, and the scale is blamed only where it is to blame."""
        fault, autopsy = self.fault, self.autopsy
        by_scale = fault.by_scale is None or bool(autopsy.at_scale_1) == fault.by_scale
        in_place = fault.modules == (ANY,) or autopsy.module in fault.modules
        return autopsy.cause == fault.cause and in_place and by_scale and self.fits


def outcomes(
    num: int, seed: int, backends: tuple[str | None, ...] = (None,), *, only: str = "", compare: bool = True
) -> Iterator[Outcome]:
    """`num` faults that had an effect on their step."""
    rng = random.Random(seed)
    done = 0
    while done < num:
        torch.manual_seed(rng.randrange(10**6))
        fault = draw(rng, backends)
        if fault is None or only not in (f"{fault.kind}", fault.setting.model, ""):
            continue
        watch = Autopsies()
        try:
            skipped, left = run_fault(fault, watch)
        except RuntimeError:  # of torch's compiler
            if fault.setting.backend is None or not _fails_without_watch(fault):
                raise
            print(f"not counted, torch.compile fails with and without a watch: {fault}", flush=True)
            continue
        if not watch.autopsies or not skipped[fault.step] or (fault.kind != "scale" and skipped.count(True) != 1):
            continue
        done += 1
        undisturbed = not compare or same(left, run_fault(fault, None)[1])
        autopsy, fits = watch.autopsies[0], True
        if fault.kind == "scale":
            fits = (
                autopsy.fitting_scale is not None and not run_fault(fault, None, scale=autopsy.fitting_scale / 2)[0][0]
            )
        yield Outcome(fault, autopsy, undisturbed, fits)


def _fails_without_watch(fault: Fault) -> bool:
    try:
        run_fault(fault, None)
    except RuntimeError:
        return True
    return False


def _groups_of(fault: Fault) -> tuple[str, ...]:
    setting = fault.setting
    compiled, checkpoints = f"compiled: {setting.backend or 'no'}", f"checkpoints: {setting.checkpoints}"
    return fault.kind, setting.model, setting.precision, compiled, checkpoints


def main() -> int:
    """Run the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--backend", action="append", help="of torch.compile: eager, aot_eager or inductor; may be repeated"
    )
    parser.add_argument("--only", default="", help="one model or kind of fault")
    parser.add_argument("--show", action="store_true", help="print every autopsy")
    options = parser.parse_args()
    results = outcomes(options.faults, options.seed, tuple(options.backend or (None,)), only=options.only)
    print_results(results, _groups_of, show=options.show)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
