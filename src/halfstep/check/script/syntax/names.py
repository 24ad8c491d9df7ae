"""What the names of a script refer to: imports and aliases resolved to full names.

A script writes `amp.autocast()` after `from torch.cuda import amp`, or `autocast()` after a star import; rules need
`torch.cuda.amp.autocast`. `Names.full` returns that for any chain of names and attributes, and "" for anything else.
Nothing is imported for this: only the import statements of the script itself are read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.check.regex import regex

__all__ = ["Imported", "Names", "called_key", "chain", "is_one", "key_of", "last_name", "read_names"]

_UNWRAPS = regex(r"unwrap|^get_(raw_)?model$|de_?parallel|without_ddp|^get_module$")
_BY_VARIABLE = regex(r"\[(?!['\"]|-?\d)")
# The names that a star import from these modules binds, as far as rules need them.
_STARS = {
    "torch.cuda.amp": ("autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    "torch.amp": ("autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    "torch.cpu.amp": ("autocast", "GradScaler"),
    "torch.nn": ("BCELoss", "DataParallel"),
    "torch.optim": ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad"),
}
# Aliases inside torch itself.
_SAME = {
    "torch.cuda.amp.autocast_mode.autocast": "torch.cuda.amp.autocast",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.cuda.amp.GradScaler",
    "torch.amp.autocast_mode.autocast": "torch.amp.autocast",
    "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.autocast": "torch.amp.autocast",
    "torch.GradScaler": "torch.amp.GradScaler",
    "torch.half": "torch.float16",
}
# Modules that import torch's `autocast`; code that is generated from them imports it from there.
_EXPORTS = ("trl.trainer.", "trl.experimental.")


@dataclass(frozen=True)
class Imported:
    """One name that an import statement binds."""

    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    full: str
    guarded: bool  # inside try or if: there may be other imports of the name


@dataclass(frozen=True)
class Names:
    """The script's import table."""

    table: dict[str, str] = field(default_factory=dict)  # local name -> full name
    imported: tuple[Imported, ...] = ()
    choices: dict[str, frozenset[str]] = field(default_factory=dict)  # names bound by more than one import

    def full(self, node: ast.AST) -> str:
        """The full name of a chain such as `amp.autocast`; "" unless it is a chain that starts at an import."""
        first = node
        while isinstance(first, ast.Attribute):
            first = first.value
        name = self.table.get(first.id, "") if isinstance(first, ast.Name) else ""
        if not name:  # most chains start at a variable
            return ""
        if first is not node:
            name = ".".join((name, *chain(node)[1:]))
        return _SAME.get(name, name)

    def ambiguous(self, node: ast.AST) -> bool:
        """Whether the first name of a chain may come from more than one import."""
        parts = chain(node)
        return bool(parts) and parts[0] in self.choices

    def uses(self, *packages: str) -> bool:
        """Whether any of these top packages is imported."""
        return any(name.split(".")[0] in packages for name in self.table.values())


def chain(node: ast.AST) -> tuple[str, ...]:
    """The names of `a.b.c` from left to right; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ()
    parts.append(node.id)
    return tuple(reversed(parts))


def key_of(node: ast.AST | None) -> str:
    """A variable's text: `scaler`, `self.scaler`, `optims[0]`, `opts["g"]`; "" for anything that is not one."""
    if isinstance(node, ast.Name):  # most often
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):  # second most often
        return f"{node.value.id}.{node.attr}"
    suffix: list[str] = []
    while node is not None:
        if isinstance(node, ast.Attribute):
            suffix.append(f".{node.attr}")
        elif isinstance(node, ast.Subscript):
            index = node.slice
            if isinstance(index, ast.Constant):
                suffix.append(f"[{index.value!r}]")
            elif isinstance(index, ast.Name):
                suffix.append(f"[{index.id}]")
            else:
                return ""
        elif isinstance(node, ast.Name):
            return node.id + "".join(reversed(suffix))
        else:
            return ""
        node = node.value
    return ""


def called_key(func: ast.expr) -> str:
    """The variable that a call runs: `model` of `unwrap(model)(x)`, and `model.encode` of `get_model(model).encode(x)`."""
    key, method = key_of(func), ""
    if key:
        return key
    if isinstance(func, ast.Attribute):
        method, func = f".{func.attr}", func.value
    inner = func.args[0] if isinstance(func, ast.Call) and len(func.args) == 1 else None
    is_unwrapped = isinstance(func, ast.Call) and _UNWRAPS.search(last_name(key_of(func.func)))
    return key_of(inner) + method if is_unwrapped and key_of(inner) else ""


def last_name(key: str) -> str:
    """The last name of a dotted key: `scaler` of `self.scaler`."""
    return key.rsplit(".", 1)[-1]


def is_one(key: str) -> bool:
    """Whether a variable's text means the same object at every use: `opts["g"]` does, `opts[i]` may not."""
    return bool(key) and not _BY_VARIABLE.search(key)


def read_names(statements: Iterable[tuple[ast.Import | ast.ImportFrom, bool]]) -> Names:
    """The import table of a script, from its import statements and whether each is guarded by try or if."""
    table: dict[str, str] = {}
    every: dict[str, set[str]] = {}
    imported = []
    for statement, guarded in statements:
        for alias, local, full in _bound_names(statement):
            table[local] = full
            if not guarded and statement.col_offset == 0:
                every.pop(local, None)  # the module's later import replaces the earlier one
            every.setdefault(local, set()).add(full)
            imported.append(Imported(statement, alias, _SAME.get(full, full), guarded))
    # `torch` means torch even in a fragment without imports.
    table.setdefault("torch", "torch")
    choices = {name: frozenset(fulls) for name, fulls in every.items() if len(fulls) > 1}
    return Names(table, tuple(imported), choices)


def _bound_names(statement: ast.Import | ast.ImportFrom) -> Iterable[tuple[ast.alias, str, str]]:
    """The names an import statement binds: the alias node, the local name and the full name."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            if alias.asname:
                yield alias, alias.asname, alias.name
            else:
                top = alias.name.split(".")[0]
                yield alias, top, top
        return
    module = "." * statement.level + (statement.module or "")
    for alias in statement.names:
        if alias.name == "*":
            for name in _STARS.get(module, ()):
                yield alias, name, f"{module}.{name}"
        else:
            source = "torch.amp" if alias.name == "autocast" and module.startswith(_EXPORTS) else module
            yield alias, alias.asname or alias.name, f"{source}.{alias.name}"
