"""The options of the command line: which ones a script declares, and whether another file may read their values."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import chain

__all__ = ["Options", "dataclass_fields", "stays_here"]

# Functions that only show or store a namespace.
_SHOWS = frozenset({
    "print", "pprint", "str", "repr", "info", "debug", "log", "vars", "init", "dump", "dumps", "format", "save_config",
    "isinstance", "type", "write", "deepcopy", "copy", "log_params", "save", "add_text", "asdict",
})  # fmt: skip
_PARSED = {"parse_args_into_dataclasses", "parse_dict", "parse_json_file", "parse_yaml_file"}
# Functions of other files that are about data, seeds or logs: they read no precision.
_UNRELATED = regex(r"(data|loader|sampler|seed|logg|tokenizer|wandb|tensorboard|makedirs|mkdir)s?(_|$)|(get|build|make|create)_?(data|train_?loader)", re.IGNORECASE)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Options:
    """The options of the command line that a script declares, and what it does with their namespace."""

    script: Script

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the script."""
        return tuple(all_nodes(self.script.tree))

    @cached_property
    def declared(self) -> list[tuple[ast.Call, str, str]]:
        """Each `add_argument` of an option: the call, its flag as written and the name of its value."""
        options: list[tuple[ast.Call, str, str]] = []
        for call in self.nodes if ".add_argument(" in self.script.source.text else ():
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            flags = [str(constant(a)) for a in call.args if isinstance(constant(a), str)]
            if call.func.attr == "add_argument" and flags and flags[-1].startswith("-"):
                flag = next((f for f in flags if f.startswith("--")), flags[-1])
                dest = constant(argument(call, None, "dest"))
                options.append((call, flag, dest if isinstance(dest, str) else flag.lstrip("-").replace("-", "_")))
        return options

    def is_switched(self, call: ast.Call, name: str) -> bool:
        """Whether something else sets the value of an option: another option, an assignment, or a default."""
        off = {f"no_{name}", f"disable_{name}", f"no{name}", f"without_{name}", f"not_{name}", f"skip_{name}"}
        if any(other is not call and (n == name or n in off) for other, _, n in self.declared):
            return True
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                return True
            if isinstance(node, ast.Call) and _sets(node, name):
                return True
        return False


def _sets(call: ast.Call, name: str) -> bool:
    """Whether a call may set a value of the namespace: setattr, set_defaults, an update of its dictionary."""
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if last == "setattr":
        return len(call.args) < 2 or constant(call.args[1]) in (..., name)
    if last == "set_defaults":
        return any(keyword.arg in (None, name) for keyword in call.keywords)
    return last == "update" and any(word in text_of(call.func) for word in ("vars(", "__dict__"))


def stays_here(options: Options) -> bool:
    """Whether the script parses its options and passes the namespace only to its own functions."""
    local = {n.name for n in options.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    parsers = {n.name for n in options.nodes if isinstance(n, ast.FunctionDef) and _parses(n)}
    spaces: set[str] = set()
    for node in options.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            last = chain(node.value.func)[-1:]
            if last and (last[0] in {"parse_args", "parse_known_args"} or last[0] in parsers):
                targets = [
                    t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])
                ]
                spaces |= {t.id for t in targets if isinstance(t, ast.Name)}
    # A parameter may have another name; `args=(args,)` of spawn passes it too.
    for node in options.nodes:
        if not isinstance(node, ast.Call):
            continue
        values = [*node.args, *(k.value for k in node.keywords)]
        values += [e for v in values if isinstance(v, ast.Tuple | ast.List) for e in v.elts]
        passed = [v for v in values if isinstance(v, ast.Name) and v.id in spaces]
        starred = [v for v in node.args if isinstance(v, ast.Starred)] + [k for k in node.keywords if k.arg is None]
        last = chain(node.func)[-1:]
        is_known = bool(last) and (
            _is_engine(node.func) or last[0] in local | _SHOWS | {"spawn", "Process"} or _UNRELATED.search(last[0])
        )
        if passed and not is_known:
            return False
        if any(spaces & {n.id for n in ast.walk(s) if isinstance(n, ast.Name)} for s in starred):
            return False
    return bool(spaces) and not _reads_any(options.nodes, spaces)


def _is_engine(func: ast.expr) -> bool:
    """Whether a function is one of DeepSpeed, which reads its own options of a namespace and no other."""
    return chain(func)[:1] == ("deepspeed",)


def _parses(function: ast.FunctionDef) -> bool:
    """Whether a function returns what `parse_args` returns."""
    names = {
        t.id
        for n in ast.walk(function)
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and chain(n.value.func)[-1:] == ("parse_args",)
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
    return any(
        (isinstance(v, ast.Name) and v.id in names)
        or (isinstance(v, ast.Call) and chain(v.func)[-1:] == ("parse_args",))
        for v in returns
    )


def _reads_any(nodes: tuple[ast.AST, ...], spaces: set[str]) -> bool:
    """Whether the namespace is stored, returned to another file, or read by a computed name."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in spaces:
            return True  # `self.args = args`: another class or file may read it
        last = chain(node.func)[-1:] if isinstance(node, ast.Call) else ()
        if last == ("vars",):
            return True  # the dictionary may go anywhere
        if (
            isinstance(node, ast.Call)
            and last == ("getattr",)
            and not all(isinstance(a, ast.Constant) for a in node.args[1:2])
        ):
            return True
    return False


def dataclass_fields(nodes: tuple[ast.AST, ...]) -> list[ast.AnnAssign]:
    """The fields of the file's dataclasses that `HfArgumentParser` fills and no other file can read.

    Left out are dataclasses whose object is passed on as a whole, other than to be printed.
    """
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    parsers = [c for c in calls if chain(c.func)[-1:] == ("HfArgumentParser",) and c.args]
    results = [
        n
        for n in nodes
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and getattr(n.value.func, "attr", "") in _PARSED
    ]
    if len(parsers) != 1 or len(results) != 1:
        return []
    source, target = parsers[0].args[0], results[0].targets[0]
    classes = source.elts if isinstance(source, ast.Tuple | ast.List) else [source]
    variables = target.elts if isinstance(target, ast.Tuple) else [target]
    own = {n.name: n for n in nodes if isinstance(n, ast.ClassDef)}
    read = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}  # `args` of `args.dtype`
    read |= {
        id(v) for c in calls if chain(c.func)[-1:] and chain(c.func)[-1] in _SHOWS - {"vars", "asdict"} for v in c.args
    }
    read |= {id(n.value) for n in nodes if isinstance(n, ast.FormattedValue)}
    fields: list[ast.AnnAssign] = []
    for name, variable in zip(classes, variables, strict=False):
        definition = own.get(name.id) if isinstance(name, ast.Name) else None
        if definition is None or not isinstance(variable, ast.Name) or isinstance(variable.ctx, ast.Load):
            continue
        loads = [n for n in nodes if isinstance(n, ast.Name) and n.id == variable.id and isinstance(n.ctx, ast.Load)]
        if loads and all(id(n) in read for n in loads):
            fields += [s for s in definition.body if isinstance(s, ast.AnnAssign)]
    return fields
