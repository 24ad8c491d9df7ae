"""What the variables of a simulated script have as values.

Numbers, strings, None, lists, tuples and dictionaries are Python's own. Everything that a script gets from elsewhere is
`Unknown`: a setting from a command line, a batch, the result of another file's function. An `Unknown` has a key, and what is
read from it twice has the same key twice (`args.fp16`), so that a path that decided once that it is true decides so again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "UNKNOWN_TENSOR",
    "Autocast",
    "Class",
    "Defaults",
    "Env",
    "Func",
    "Instance",
    "Library",
    "Negated",
    "NoGrad",
    "Optimizer",
    "Params",
    "Partial",
    "Scaler",
    "Super",
    "Suspended",
    "Tensor",
    "Test",
    "Unknown",
    "combined",
    "has_tensor",
    "is_module",
    "is_plain",
    "unknown",
]


# Names of one setting in different places.
_SAME = {
    **dict.fromkeys(("use_amp", "enable_amp", "amp_enabled", "mixed_precision", "use_mixed_precision", "is_amp", "with_amp"), "amp"),
    **dict.fromkeys(("use_fp16", "enable_fp16", "is_fp16"), "fp16"),
    **dict.fromkeys(("use_bf16", "enable_bf16"), "bf16"),
}  # fmt: skip  # fmt: skip
_MODULES = {"torch.nn.Module", "torch.nn.modules.module.Module"}
_SETTINGS = {"amp", "fp16", "bf16", *_SAME}


@dataclass(frozen=True)
class Unknown:
    """A value that the text does not decide; equal keys mean the same value."""

    key: str


@dataclass(frozen=True)
class Test:
    """A comparison of an unknown value with one of Python's own."""

    key: str
    operator: str  # "is", "==", "<", ...
    other: Any

    @property
    def question(self) -> str:
        """The comparison as a path records it."""
        return f"{self.key} {self.operator} {self.other!r}"


@dataclass(frozen=True)
class Negated:
    """The opposite of an unknown value."""

    value: Any


@dataclass(frozen=True)
class Library:
    """A module, class or function of a library, by its full name."""

    full: str


@dataclass(eq=False)
class Env:
    """The variables of a scope, and the scopes around it."""

    parent: Env | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    of_parent: set[str] = field(default_factory=set)  # declared global or nonlocal
    local: frozenset[str] = frozenset()  # names that the function assigns: they have no value before
    method: Func | None = None  # the method whose variables these are
    functions: list[Func] = field(default_factory=list)  # defined here, before decorators replace them


@dataclass(eq=False)
class Func:
    """A function of the script, and the object that it is a method of."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    env: Env
    owner: Any = None
    cls: Class | None = None


@dataclass(eq=False)
class Class:
    """A class of the script."""

    node: ast.ClassDef
    bases: tuple[Any, ...]
    attributes: dict[str, Any]

    def lookup(self, name: str) -> Any:
        """An attribute of the class or of a base that the script has; ... if there is none."""
        return _found(self.lineage(), name)

    def lineage(self) -> list[Class]:
        """The class and its bases in the script, in the order in which Python looks for an attribute."""
        classes = [self]
        for base in self.bases:
            if isinstance(base, Class):
                classes += base.lineage()
        return [cls for index, cls in enumerate(classes) if cls not in classes[index + 1 :]]

    def libraries(self) -> list[Any]:
        """The bases that the script does not define."""
        return [base for cls in self.lineage() for base in cls.bases if not isinstance(base, Class)]


@dataclass(eq=False)
class Instance:
    """An object of a class of the script."""

    cls: Class
    key: str
    attributes: dict[str, Any] = field(default_factory=dict)
    is_built: bool = False  # its constructor has run


@dataclass(frozen=True)
class Super:
    """What `super()` gives: an object, and the classes in which its methods are looked for."""

    owner: Instance
    classes: tuple[Class, ...]

    def lookup(self, name: str) -> Any:
        """An attribute of the classes; ... if there is none."""
        return _found(self.classes, name)


class Defaults(dict[Any, Any]):
    """A `defaultdict`, and what it calls for a new key."""

    def __init__(self, factory: Any) -> None:
        super().__init__()
        self.factory = factory


@dataclass(eq=False)
class Partial:
    """A function with some of its arguments."""

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Params:
    """Parameters of models, all or some of them."""

    models: frozenset[str]


@dataclass(frozen=True)
class Tensor:
    """A tensor that was computed from models, by their keys; None: from anything."""

    models: frozenset[str] | None
    formats: frozenset[str] = frozenset()  # of the autocast regions that computed it; "": not known
    scaler: Scaler | None = None  # whose scale it is multiplied with
    version: int = 0  # of that scale
    region: ast.AST | None = None  # the autocast region that computed it
    halved: frozenset[str] = frozenset()  # the models that computed in float16
    divisors: frozenset[str] = frozenset()  # the numbers of micro-batches that have divided it
    divided_twice: str = ""  # the one that has done so twice

    @property
    def half(self) -> bool | None:
        """Whether float16 autocast computed it; None: not known."""
        return None if "" in self.formats else "float16" in self.formats


UNKNOWN_TENSOR = Tensor(None, frozenset({""}))


@dataclass(eq=False)
class Scaler:
    """A GradScaler: what torch stores of its optimizers since the last update."""

    key: str
    enabled: Any
    node: ast.AST | None
    is_for_cuda: bool = False
    version: int = 0
    unscaled: dict[Optimizer, ast.AST] = field(default_factory=dict)
    stepped: dict[Optimizer, ast.AST] = field(default_factory=dict)
    checked: set[Optimizer] = field(default_factory=set)  # those with gradients when they were unscaled or stepped
    is_sure: bool = True  # no code of another file had it since the last update


@dataclass(eq=False)
class Optimizer:
    """An optimizer, and the models whose parameters it has; None: not known."""

    key: str
    models: frozenset[str] | None
    node: ast.AST | None = None
    sites: tuple[ast.AST, ...] = ()  # the calls around its creation
    is_of_all: bool = True  # its models are all that it may have; not those that a function got which creates it
    created: int = 0  # the number of backward passes before it was created
    cleared: int = 0  # the number of backward passes before its gradients were cleared
    cleared_perhaps: int = 0  # the same, for models that may be its own under another name
    unscaled: int = 0  # the number of backward passes before its gradients were unscaled
    clipped: Any = None  # the report of a clip of scaled gradients, which its next step confirms
    void_clip: Any = None  # the report of a clip of no gradients, which a step without another one confirms
    stepped: int = 0  # the number of backward passes before its last step
    step_line: int = 0
    wasted: int = 0  # the number of backward passes before gradients were cleared that no step had used
    skips_at_waste: int = 0
    is_sure: bool = True  # no code of another file had it since then


@dataclass(frozen=True)
class Autocast:
    """An autocast region: its dtype, or "" if that is not known."""

    dtype: str
    enabled: Any
    node: ast.AST
    device: str = ""  # "cuda", or "" if that is not known


@dataclass(eq=False)
class Suspended:
    """A generator, or a context manager written as one, that the script has called: it runs where its values are consumed."""

    function: Func
    args: list[Any]
    kwargs: dict[str, Any]
    node: ast.AST


@dataclass(frozen=True)
class NoGrad:
    """A region that records no graph."""


def _found(classes: Iterable[Class], name: str) -> Any:
    """The attribute of the first class that has it; ... if none has."""
    return next((cls.attributes[name] for cls in classes if name in cls.attributes), ...)


def is_module(cls: Class) -> bool:
    """Whether a class has no base outside the script but torch's Module."""
    libraries = cls.libraries()
    return bool(libraries) and all(isinstance(b, Library) and b.full in _MODULES for b in libraries)


def is_plain(value: Any) -> bool:
    """Whether this is one of Python's own values without unknown parts."""
    if isinstance(value, tuple | list):
        return all(is_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str | bytes)


def unknown(key: str) -> Unknown:
    """An unknown value; names of the same precision setting are one value."""
    last = key.rpartition(".")[2]
    return Unknown(f"setting {_SAME.get(last, last)}") if last in _SETTINGS else Unknown(key)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Values, and those in lists of them."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def has_tensor(values: Iterable[Any]) -> bool:
    """Whether one of these values, or of the elements of a list, is a tensor."""
    return any(isinstance(v, Tensor) for v in _flat(values))


def combined(*values: Any) -> Tensor:
    """What an operation makes of tensors and other values."""
    tensors = [v for v in _flat(values) if isinstance(v, Tensor)]
    models: frozenset[str] | None = frozenset()
    for tensor in tensors:
        models = None if models is None or tensor.models is None else models | tensor.models
    formats = frozenset().union(*(t.formats for t in tensors))
    scaled = next((t for t in tensors if t.scaler is not None), None)
    region = next((t.region for t in tensors if t.region is not None), None)
    halved = frozenset().union(*(t.halved for t in tensors))
    divisors = frozenset().union(*(t.divisors for t in tensors))
    twice = max((t.divided_twice for t in tensors), default="")
    scaler, version = (None, 0) if scaled is None else (scaled.scaler, scaled.version)
    return Tensor(models, formats, scaler, version, region, halved, divisors, twice)
