"""A Job: one small value that says what to train, for every command to work on.

A job is a handful of callables. Each receives just the arguments it names, so `loss=lambda model, batch: ...` and
`data=lambda batch_size, split, seed: ...` are both complete, and a later Halfstep can offer more names without
breaking a file written today. Names are checked when the Job is made, because a misspelt argument should fail on
the line that has it and not an hour later at the first validation.

    field       builds or computes               may name, besides batch_size, seed, rank, world_size, device
    model       the module                       -
    data        an iterable of batches           split, epoch
    loss        the loss of one batch            model, batch, split, epoch, params, named_params
    metric      a number for one batch           model, batch, split, epoch, params, named_params
    optimizer   the optimizer                    model, params, named_params
    scheduler   a scheduler, stepped per update  optimizer, model

An exception inside one of them comes out as a `JobError` that names the field and the user's own line. Two kinds
pass untouched: Halfstep's own errors, which already say what to do, and running out of memory, which the batch
finder has to recognise.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from halfstep.errors import HalfstepError, SettingError, nearest

if TYPE_CHECKING:
    from halfstep.backends.context import RunContext

__all__ = [
    "ARGUMENTS",
    "FIELDS",
    "SPLITS",
    "Arguments",
    "Job",
    "JobError",
    "call_by_name",
    "read_arguments",
    "trainable",
    "user_line",
]

# What each name stands for; the order is the one in which error messages list them.
ARGUMENTS = {
    "model": "the module that is trained",
    "named_params": "list of (name, parameter), the trainable ones",
    "params": "list of the trainable parameters",
    "batch": "what the data yields",
    "batch_size": "examples per batch in one process",
    "split": '"train" or "val"',
    "epoch": "number of the epoch, from 0",
    "seed": "the run's seed",
    "rank": "number of this process, from 0",
    "world_size": "number of processes",
    "device": "the torch.device of this process",
    "optimizer": "what the `optimizer` field returned",
}
SPLITS = ("train", "val")

_RUN = ("batch_size", "seed", "rank", "world_size", "device")
_STEP = ("model", "batch", "split", "epoch", "params", "named_params", *_RUN)

# Which names exist when each field is called.
FIELDS: dict[str, tuple[str, ...]] = {
    "model": _RUN,
    "data": ("split", "epoch", *_RUN),
    "loss": _STEP,
    "optimizer": ("model", "params", "named_params", *_RUN),
    "metric": _STEP,
    "scheduler": ("optimizer", "model", *_RUN),
}
_OPTIONAL = ("metric", "scheduler")
_NEEDS_NAMES = ("loss", "optimizer", "metric", "scheduler")  # of no use without an argument
_EXAMPLE = {
    "model": "lambda: MyModel()",
    "data": "lambda batch_size, split: my_loader(batch_size, split)",
    "loss": "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])",
    "optimizer": "lambda params: torch.optim.AdamW(params, lr=3e-4)",
    "metric": "lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).float().mean()",
    "scheduler": "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)",
}


class JobError(HalfstepError, RuntimeError):
    """A callable of the user's job raised; the message names the field, the error and the line."""


@dataclass(frozen=True)
class Arguments:
    """The arguments that a callable can be given by name."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    variadic: bool = False

    def choose(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the available values that the callable names."""
        return {name: available[name] for name in (*self.required, *self.optional) if name in available}


def read_arguments(function: Any, what: str = "The callable") -> Arguments:
    """The argument names of any callable: function, lambda, class, bound method, partial.

    `*args` and `**kwargs` name nothing, so they receive nothing. What `functools.partial` has bound stays bound.
    Positional-only arguments cannot be given by name and are refused, unless they have a default.
    """
    if not callable(function):
        raise SettingError(
            f"{what} is {_show(function)}, which cannot be called; write a function or a lambda that returns it."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise SettingError(
            f"{what} is {_show(function)}, whose argument names cannot be read ({error}); wrap it in a lambda that names them."
        ) from error
    bound: set[str] = set()
    inner = function
    while isinstance(inner, functools.partial):
        bound |= inner.keywords.keys()
        inner = inner.func
    required: list[str] = []
    optional: list[str] = []
    variadic = False
    for parameter in parameters:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            variadic = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            if parameter.default is parameter.empty or parameter.name in ARGUMENTS:
                raise SettingError(
                    f"{what} takes {parameter.name!r} by position only, and arguments are given by name; "
                    "remove the '/' from its signature, or wrap it in a lambda."
                )
        elif parameter.name not in bound:
            (required if parameter.default is parameter.empty else optional).append(parameter.name)
    return Arguments(tuple(required), tuple(optional), variadic)


def call_by_name(function: Callable[..., Any], available: Mapping[str, Any]) -> Any:
    """Call `function` with just those of the `available` values that its arguments name."""
    arguments = read_arguments(function)
    _refuse_unknown(arguments, tuple(available), "The callable")
    return function(**arguments.choose(available))


@dataclass(frozen=True)
class Job:
    """What to train: a model, data, a loss and an optimizer, each a callable that names what it needs.

    Args:
        model: returns a new module.
        data: returns an iterable of batches for `split` ("train" or "val").
        loss: returns the loss of one batch, a one-element tensor.
        optimizer: returns the optimizer.
        metric: returns one number for one batch; optional.
        scheduler: returns a scheduler that is stepped once per applied update; optional.
        shard: what FSDP wraps, as module classes or patterns of module names such as "blocks.*".
        name: how error messages call the job; without it they say where the callable is defined.
    """

    model: Callable[..., Any]
    data: Callable[..., Any]
    loss: Callable[..., Any]
    optimizer: Callable[..., Any]
    metric: Callable[..., Any] | None = None
    scheduler: Callable[..., Any] | None = None
    shard: tuple[type | str, ...] = ()
    name: str = field(default="", kw_only=True)
    _arguments: dict[str, Arguments] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for which in FIELDS:
            value = getattr(self, which)
            if value is not None or which not in _OPTIONAL:
                self._arguments[which] = _check_field(which, value)
        object.__setattr__(self, "shard", _check_shard(self.shard))

    def call(self, which: str, run: RunContext | None = None, /, **context: Any) -> Any:
        """Call the field `which` with the values of `run` and `context` that it names, and check what it returns.

        An argument with a default keeps it where neither has such a name. `params` and `named_params` are taken
        from `model` when they are not passed. A metric or scheduler that the job does not have returns None.
        """
        context = ({} if run is None else run.job_arguments()) | context
        if which not in FIELDS:
            raise SettingError(f"A job has no field {which!r} to call; it has {', '.join(FIELDS)}.")
        function = getattr(self, which)
        if function is None:
            return None
        arguments = self._arguments[which]
        if "model" in context:
            named = {*arguments.required, *arguments.optional} - context.keys()
            if "named_params" in named:
                context["named_params"] = trainable(context["model"])
            if "params" in named:
                context["params"] = [parameter for _, parameter in trainable(context["model"])]
        missing = [name for name in arguments.required if name not in context]
        if missing:
            raise SettingError(
                f"{self.describe(which)} needs {_quote(missing)}, not known where it is called now "
                f"(known: {_quote(context) or 'nothing'}); give it a default."
            )
        with self.guard(which):
            result = function(**arguments.choose(context))
        problem = _RESULT[which](result)
        if problem:
            raise JobError(
                f"{self.describe(which)} returned {_show(result)}, {problem}. Write e.g. {which}={_EXAMPLE[which]}."
            )
        return result

    def guard(self, which: str) -> _Guard:
        """A `with` block whose exceptions come out as a `JobError` of `which`, e.g. around `next(batches)`."""
        return _Guard(self, which)

    def describe(self, which: str) -> str:
        """Words for one field of this job, such as "The loss of job 'digits'"."""
        if self.name:
            return f"The {which} of job {self.name!r}"
        place = _place(getattr(self, which))
        return f"The {which} of the job" + (f" (defined at {place})" if place else "")


def trainable(model: Any) -> list[tuple[str, Any]]:
    """The (name, parameter) pairs of a module that receive gradients, tied parameters once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


class _Guard:
    """Turns exceptions of the user's code into `JobError`, keeping the original as the cause."""

    def __init__(self, job: Job, which: str) -> None:
        self._job, self._which = job, which

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if (
            isinstance(error, Exception)
            and not isinstance(error, (HalfstepError, StopIteration))
            and not _out_of_memory(error)
        ):
            said = "".join(traceback.format_exception_only(error)).strip()
            raise JobError(f"{self._job.describe(self._which)} failed{user_line(error)}: {said}") from error
        return False


def user_line(error: BaseException) -> str:
    """Where in the user's own code an exception comes from, as " at FILE:LINE", or "" where that is not known.

    The deepest line outside the standard library, installed packages and Halfstep; if there is none, the first
    line outside Halfstep, and for Halfstep's own jobs the deepest.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith(_PACKAGE)]
    own = [f for f in outside if not f.filename.startswith(_LIBRARIES)]
    best = own[-1] if own else outside[0] if outside else frames[-1] if frames else None
    return f" at {best.filename}:{best.lineno}" if best else ""


_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# "<" starts the names of code that has no file: generated by torch.compile, dataclasses, importlib.
_LIBRARIES = ("<", *(sysconfig.get_path(key) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")))


def _out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # if nothing has imported torch, it cannot have raised
    return isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def _check_field(which: str, value: Any) -> Arguments:
    """The arguments of one field's callable; an error at once for what could never be called."""
    if not callable(value) or (hasattr(value, "named_parameters") and not isinstance(value, type)):
        raise SettingError(
            f"Job({which}=...) takes a callable that returns a new object for every run, not {_show(value)}; "
            f"write e.g. {which}={_EXAMPLE[which]}."
        )
    arguments = read_arguments(value, f"Job({which}=...)")
    _refuse_unknown(arguments, FIELDS[which], f"Job({which}=...)")
    if which in _NEEDS_NAMES and not {*arguments.required, *arguments.optional} & {*FIELDS[which]}:
        hint = " (a decorator without functools.wraps hides the names)" if arguments.variadic else ""
        raise SettingError(
            f"Job({which}=...) names none of the arguments it could use{hint}, so it would be called with nothing; "
            f"name them, e.g. {which}={_EXAMPLE[which]}."
        )
    return arguments


def _refuse_unknown(arguments: Arguments, known: tuple[str, ...], what: str) -> None:
    """Raise for the first required argument that is not among the known names."""
    for name in arguments.required:
        if name in known:
            continue
        if name in ARGUMENTS:
            problem = f"{what} names the argument {name!r}, which does not exist yet when it is called."
        else:
            close = nearest(name, known)
            hint = f" Did you mean {close!r}?" if close else ""
            problem = f"{what} has an unknown argument {name!r}.{hint}"
        listed = ", ".join(n for n in dict.fromkeys((*ARGUMENTS, *known)) if n in known) or "none"
        raise SettingError(f"{problem} Known here: {listed}. Other arguments need a default or functools.partial.")


def _check_shard(shard: Any) -> tuple[type | str, ...]:
    """The modules for FSDP as a tuple; one name or class may stand alone."""
    items = (shard,) if isinstance(shard, (str, type)) else tuple(shard) if isinstance(shard, Iterable) else None
    if items is None or not all(isinstance(item, (str, type)) for item in items):
        raise SettingError(
            f'Job(shard=...) takes module classes or name patterns, such as (Block,) or ("blocks.*",), not {_show(shard)}.'
        )
    return items


def _not_module(value: Any) -> str:
    return (
        "" if callable(value) and hasattr(value, "named_parameters") and not isinstance(value, type) else "not a module"
    )


def _not_iterable(value: Any) -> str:
    fits = isinstance(value, Iterable) or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))
    return "" if fits and not isinstance(value, (str, bytes, Mapping, type)) else "not an iterable of batches"


def _not_loss(value: Any) -> str:
    if not hasattr(value, "backward") or not hasattr(value, "numel"):
        return "not a tensor to call backward on"
    return "" if value.numel() == 1 else f"of shape {tuple(value.shape)} where one number is needed; average it"


def _not_number(value: Any) -> str:
    fits = isinstance(value, numbers.Real) or (hasattr(value, "numel") and value.numel() == 1)
    return "" if fits else "not one number"


def _not_optimizer(value: Any) -> str:
    return "" if hasattr(value, "step") and hasattr(value, "param_groups") else "not an optimizer"


def _not_scheduler(value: Any) -> str:
    return "" if hasattr(value, "step") else "not a scheduler"


_RESULT: dict[str, Callable[[Any], str]] = {
    "model": _not_module,
    "data": _not_iterable,
    "loss": _not_loss,
    "optimizer": _not_optimizer,
    "metric": _not_number,
    "scheduler": _not_scheduler,
}


def _place(function: Any) -> str:
    """FILE:LINE of a callable's definition, or "" for one that was not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _show(value: Any) -> str:
    """A short description of a value for a message: what it is, not all that it holds."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"


def _quote(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
