"""Settings that another file passes: parameters whose annotation is a class of settings of the script.

def fit(cfg: TrainConfig): ...                               TrainConfig() with its defaults, or one of them changed
class Trainer:
    def __init__(self, model, args: "TrainArgs"): ...        the same for the methods that nothing in the script calls

A caller that the script does not show passes what a user sets, as a command line does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex

__all__ = ["annotations_of", "is_settings", "names_in", "takes_settings"]

_CONFIG = regex(r"conf|cfg|arg|opt(ion)?s?$|setting|param|flags|recipe|hps$", re.IGNORECASE)
_DATA = ("dataclass", "define", "frozen", "attrs", "attr.s")
_BASES = ("BaseModel", "BaseSettings", "NamedTuple", "Struct")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_settings(cls: ast.ClassDef) -> bool:
    """Whether a class is named like settings, as its fields are."""
    return bool(_CONFIG.search(cls.name))


def _is_data(cls: ast.ClassDef) -> bool:
    """Whether a class is created from its fields."""
    decorators = (ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in cls.decorator_list)
    bases = (ast.unparse(base) for base in cls.bases)
    return any(d.endswith(_DATA) for d in decorators) or any(b.endswith(_BASES) for b in bases)


def annotations_of(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The parameters of a function with an annotation."""
    spec = getattr(function, "args", None)
    for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if spec is not None else ():
        if each.annotation is not None:
            yield each.arg, each.annotation


def names_in(annotation: ast.expr) -> list[str]:
    """The classes that an annotation may mean: one by its name, as a string, or `X | None`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return re.findall(r"[A-Za-z_]\w*", annotation.value)
    return [n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)]


def takes_settings(tree: ast.Module) -> set[ast.AST]:
    """The functions and methods that another file calls with settings of a class of the script."""
    classes = [s for s in tree.body if isinstance(s, ast.ClassDef)]
    settings = {c.name for c in classes if is_settings(c) and _is_data(c)}
    if not settings:
        return set()

    def takes(function: ast.AST) -> bool:
        return any(not settings.isdisjoint(names_in(each)) for _, each in annotations_of(function))

    functions: set[ast.AST] = {s for s in tree.body if isinstance(s, _FUNCTIONS) and takes(s)}
    for cls in classes:
        methods = [part for part in cls.body if isinstance(part, _FUNCTIONS)]
        is_built = any(part.name == "__init__" and takes(part) for part in methods)
        functions.update(part for part in methods if is_built or takes(part))
    return functions
