"""A Job: one small value that defines what to train, used by every command.

A job is a handful of callables. Each receives only the arguments it names, so `loss=lambda model, batch: ...` and
`data=lambda batch_size, split, seed: ...` are both complete, and a later Halfstep can offer more names without
breaking existing files. Names are checked when the Job is built, so a misspelt argument fails on its own line and not
an hour later at the first validation.

`batch_size`, `seed`, `rank`, `world_size` and `device` come from the `RunContext` of the process; every field may name
them. The others are passed by the caller of `Job.call`:

    field       builds or computes               may also name
    model       the module                       -
    data        an iterable of batches           split, epoch
    loss        the loss of one batch            model, batch, split, epoch, params, named_params
    metric      a number for one batch           model, batch, split, epoch, params, named_params
    optimizer   the optimizer                    model, params, named_params
    scheduler   a scheduler, stepped per update  optimizer, model

An exception in one of them is re-raised as a `JobError` (`failures.py`) that names the field and the line in the user's
code.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from halfstep.errors import SettingError, nearest
from halfstep.jobs.failures import JobError, JobGuard, user_line

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

# The meaning of each name, in the order in which error messages list them.
ARGUMENTS = {
    "model": "the module that is trained",
    "named_params": "list of (name, parameter), the trainable ones",
    "params": "list of the trainable parameters",
    "batch": "one item of the data",
    "batch_size": "examples per batch in one process",
    "split": '"train" or "val"',
    "epoch": "number of the epoch, from 0",
    "seed": "the run's seed",
    "rank": "number of this process, from 0",
    "world_size": "number of processes",
    "device": "the torch.device of this process",
    "optimizer": "the result of the `optimizer` field",
}
SPLITS = ("train", "val")

_RUN = ("batch_size", "seed", "rank", "world_size", "device")
_STEP = ("model", "batch", "split", "epoch", "params", "named_params", *_RUN)

# The names that are available when each field is called.
FIELDS: dict[str, tuple[str, ...]] = {
    "model": _RUN,
    "data": ("split", "epoch", *_RUN),
    "loss": _STEP,
    "optimizer": ("model", "params", "named_params", *_RUN),
    "metric": _STEP,
    "scheduler": ("optimizer", "model", *_RUN),
}
_OPTIONAL = ("metric", "scheduler")
_NEEDS_NAMES = ("loss", "optimizer", "metric", "scheduler")  # useless without an argument
_EXAMPLE = {
    "model": "lambda: MyModel()",
    "data": "lambda batch_size, split: my_loader(batch_size, split)",
    "loss": "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])",
    "optimizer": "lambda params: torch.optim.AdamW(params, lr=3e-4)",
    "metric": "lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).float().mean()",
    "scheduler": "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)",
}


@dataclass(frozen=True)
class Arguments:
    """The arguments that can be passed to a callable by name."""

    required: tuple[str, ...]
    defaults: Mapping[str, Any]  # of the optional ones
    variadic: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The required arguments, then the optional ones."""
        return (*self.required, *self.defaults)

    def choose(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """The subset of the available values that the callable names."""
        return {name: available[name] for name in self.names if name in available}


def read_arguments(function: Any, label: str = "The callable") -> Arguments:
    """The argument names of any callable: function, lambda, class, bound method, partial.

    `*args` and `**kwargs` name nothing, so they receive nothing. Arguments bound by `functools.partial` stay bound.
    Positional-only arguments cannot be passed by name and are rejected, unless they have a default. `label` starts
    the error messages.
    """
    if not callable(function):
        raise SettingError(
            f"{label} is {_show(function)}, which cannot be called; write a function or a lambda that returns it."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise SettingError(
            f"{label} is {_show(function)}, whose argument names cannot be read ({error}); wrap it in a lambda that names them."
        ) from error
    bound: set[str] = set()
    inner = function
    while isinstance(inner, functools.partial):
        bound |= inner.keywords.keys()
        inner = inner.func
    required: list[str] = []
    defaults: dict[str, Any] = {}
    variadic = False
    for parameter in parameters:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            variadic = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            if parameter.default is parameter.empty or parameter.name in ARGUMENTS:
                raise SettingError(
                    f"{label} takes {parameter.name!r} by position only, but arguments are passed by name; "
                    "remove the '/' from its signature, or wrap it in a lambda."
                )
        elif parameter.name in bound:
            continue
        elif parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            defaults[parameter.name] = parameter.default
    return Arguments(tuple(required), defaults, variadic)


def call_by_name(function: Callable[..., Any], available: Mapping[str, Any]) -> Any:
    """Call `function` with those `available` values that its arguments name."""
    arguments = read_arguments(function)
    _reject_unknown(arguments, tuple(available), "The callable")
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
        shard: the modules that FSDP wraps, as classes or patterns of module names such as "blocks.*".
        name: the job's name in error messages; without it they show where the callable is defined.
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

    def call(self, which: str, run_context: RunContext | None = None, /, **values: Any) -> Any:
        """Call the field `which` with those values that it names, and check the type of its result.

        `run_context` provides `batch_size`, `seed`, `rank`, `world_size` and `device`; `values` are the rest, and
        override it. An argument that neither provides keeps its default. `params` and `named_params` are derived from
        `model` unless they are passed. Returns None for a metric or scheduler that the job does not have, and for
        `data` that returns None for split="val": the job has no validation data.
        """
        values = ({} if run_context is None else run_context.job_arguments()) | values
        if which not in FIELDS:
            raise SettingError(f"A job has no field {which!r} to call; it has {', '.join(FIELDS)}.")
        function = getattr(self, which)
        if function is None:
            return None
        arguments = self._arguments[which]
        if "model" in values:
            named = {*arguments.names} - values.keys()
            if "named_params" in named:
                values["named_params"] = trainable(values["model"])
            if "params" in named:
                values["params"] = [parameter for _, parameter in trainable(values["model"])]
        missing = [name for name in arguments.required if name not in values]
        if missing:
            raise SettingError(
                f"{self.describe(which)} needs {_quote(missing)}, which this call does not provide "
                f"(it provides: {_quote(values) or 'nothing'}); pass it, or give the argument a default."
            )
        with self.guard(which):
            result = function(**arguments.choose(values))
        if which == "data" and result is None and values.get("split") == "val":
            return None
        problem = _RESULT[which](result)
        if problem:
            raise JobError(
                f"{self.describe(which)} returned {_show(result)}, {problem}. Write e.g. {which}={_EXAMPLE[which]}."
            )
        return result

    def guard(self, which: str) -> JobGuard:
        """A `with` block that re-raises exceptions as a `JobError` of `which`, e.g. around `next(batches)`."""
        return JobGuard(lambda: self.describe(which))

    @property
    def has_validation(self) -> bool:
        """Whether `data` names `split`; data that cannot distinguish the splits has no validation split."""
        return "split" in self._arguments["data"].names

    def default_batch_size(self) -> int | None:
        """The default of `batch_size` in the signature of `data`, or else of another field; None without one."""
        for which in ("data", *FIELDS):
            default = self._arguments[which].defaults.get("batch_size") if which in self._arguments else None
            if isinstance(default, int) and not isinstance(default, bool) and default > 0:
                return default
        return None

    def describe(self, which: str) -> str:
        """The name of one field in messages, such as "The loss of job 'digits'"."""
        if self.name:
            return f"The {which} of job {self.name!r}"
        place = _place(getattr(self, which))
        return f"The {which} of the job" + (f" (defined at {place})" if place else "")


def trainable(model: Any) -> list[tuple[str, Any]]:
    """The (name, parameter) pairs of a module's trainable parameters, tied ones once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _check_field(which: str, value: Any) -> Arguments:
    """The arguments of one field's callable; raises for a value that could never be called."""
    if not callable(value) or (hasattr(value, "named_parameters") and not isinstance(value, type)):
        raise SettingError(
            f"Job({which}=...) takes a callable that returns a new object for every run, not {_show(value)}; "
            f"write e.g. {which}={_EXAMPLE[which]}."
        )
    arguments = read_arguments(value, f"Job({which}=...)")
    _reject_unknown(arguments, FIELDS[which], f"Job({which}=...)")
    if which in _NEEDS_NAMES and not {*arguments.names} & {*FIELDS[which]}:
        hint = " (a decorator without functools.wraps hides the names)" if arguments.variadic else ""
        raise SettingError(
            f"Job({which}=...) names none of the arguments it could use{hint}, so it would be called without any; "
            f"name them, e.g. {which}={_EXAMPLE[which]}."
        )
    return arguments


def _reject_unknown(arguments: Arguments, known: tuple[str, ...], label: str) -> None:
    """Raise for the first required argument that is not among the known names."""
    for name in arguments.required:
        if name in known:
            continue
        if name in ARGUMENTS:
            problem = f"{label} names the argument {name!r}, which does not exist yet when it is called."
        else:
            close = nearest(name, known)
            hint = f" Did you mean {close!r}?" if close else ""
            problem = f"{label} has an unknown argument {name!r}.{hint}"
        listed = ", ".join(n for n in dict.fromkeys((*ARGUMENTS, *known)) if n in known) or "none"
        raise SettingError(f"{problem} Known here: {listed}. Other arguments need a default or functools.partial.")


def _check_shard(shard: Any) -> tuple[type | str, ...]:
    """The modules for FSDP as a tuple; accepts a single name or class."""
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
    if isinstance(value, (list, tuple)):
        return "not one scheduler; combine several with torch.optim.lr_scheduler.ChainedScheduler or SequentialLR"
    if not callable(getattr(value, "step", None)):
        return "not a scheduler"
    from halfstep.engine.schedules import needs_metric, required_arguments  # here, because it imports torch

    needed = required_arguments(value.step)
    if needed and not needs_metric(value) and not hasattr(value, "step_update"):  # timm's way to count updates
        return (
            f"whose step() needs {_quote(tuple(needed))}; it is called as step(), once per update, so return a scheduler of "
            "torch.optim.lr_scheduler, or wrap this one in a class that passes the argument"
        )
    return ""


_RESULT: dict[str, Callable[[Any], str]] = {
    "model": _not_module,
    "data": _not_iterable,
    "loss": _not_loss,
    "optimizer": _not_optimizer,
    "metric": _not_number,
    "scheduler": _not_scheduler,
}


def _place(function: Any) -> str:
    """FILE:LINE of a callable's definition, or "" if it is not Python code."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _show(value: Any) -> str:
    """A short description of a value for a message: its type, not its contents."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"


def _quote(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
