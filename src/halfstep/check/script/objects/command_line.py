"""The options of the command line: which ones a script declares, and whether another file may read their values."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import chain
from halfstep.check.script.syntax.shown import shows_only

__all__ = ["Options", "dataclass_fields", "is_amplitude", "names_format", "stays_here"]

# Functions that only show or store a namespace.
_SHOWS = frozenset({
    "print", "pprint", "str", "repr", "info", "debug", "log", "vars", "init", "dump", "dumps", "format", "save_config",
    "isinstance", "type", "write", "deepcopy", "copy", "log_params", "save", "add_text", "asdict",
    "init_trackers", "log_hyperparams", "add_hparams", "log_config", "send_example_telemetry",
})  # fmt: skip
_FORMATS = frozenset(
    {"fp16", "bf16", "fp32", "tf32", "float16", "bfloat16", "float32", "half", "16-mixed", "bf16-mixed"}
)
_AMPLITUDE = regex(r"amplif|amplitude|ampere", re.IGNORECASE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_PARSED = {"parse_args_into_dataclasses", "parse_dict", "parse_json_file", "parse_yaml_file"}
# Functions of other files that are about data, seeds or logs: they read no precision.
_MPS = regex(r"^[\w.()]*device[\w.()]* == ['\"]mps['\"]$|^torch\.backends\.mps\.is_available\(\)$")
_HAS_CUDA = regex(r"^torch\.cuda\.is_available\(\)$")
_UNRELATED = regex(r"(data|loader|sampler|seed|logg(er|ing)?|tokenizer|wandb|tensorboard|makedirs|mkdir)s?(_|$)|(get|build|make|create)_?(data|train_?loader)|data_?(set|loader)s?$|^(init|setup)_?(dist|ddp)|distributed_mode$", re.IGNORECASE)  # fmt: skip


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

    def only_for(self, value: ast.AST) -> tuple[ast.Call, str] | None:
        """The option that nothing but an expression reads, `"bf16" if args.bf16 else "no"`: its declaration and its flag."""
        inside = {n.attr for n in ast.walk(value) if isinstance(n, ast.Attribute)}
        for call, flag, name in self.declared:
            reads = [n for n in self.nodes if isinstance(n, ast.Attribute) and n.attr == name] if name in inside else []
            if len(reads) == 1 and not any(isinstance(n, ast.Constant) and n.value == name for n in self.nodes):
                return call, flag
        return None

    def may_be_read(self, value: ast.AST | None) -> bool:
        """Whether an expression reads an option whose namespace another file gets, where it may choose the format of the run."""
        inside = {n.attr for n in ast.walk(value) if isinstance(n, ast.Attribute)} if value is not None else set()
        return not inside.isdisjoint(name for _, _, name in self.declared) and not stays_here(self)

    def is_switched(self, calls: Collection[ast.Call], name: str, default: ast.Call | None = None) -> bool:
        """Whether something else than some options, and a call of set_defaults, sets their value: another option or an assignment."""
        off = {f"no_{name}", f"disable_{name}", f"no{name}", f"without_{name}", f"not_{name}", f"skip_{name}"}
        if any(other not in calls and (n == name or n in off) for other, _, n in self.declared):
            return True
        is_parser = "self.add_argument(" in self.script.source.text or "namespace=self" in self.script.source.text
        spaces = _namespaces(self)
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                # `self.amp = amp` of a trainer is another attribute of the same name, unless the object is the namespace.
                is_own = not is_parser and isinstance(node.value, ast.Name) and node.value.id == "self"
                if not is_own and not self._is_copy(node, spaces) and not self._is_for_hardware(node):
                    return True
            elif isinstance(node, ast.Call) and node is not default and _sets(node, name):
                return True
        return False

    def set_default(self, name: str) -> tuple[ast.Call, object] | None:
        """The one `parser.set_defaults(amp=False)` of an option, with the value; None if there is none, or several."""
        calls = [n for n in self.nodes if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "set_defaults"]
        defaults = [(call, constant(k.value)) for call in calls for k in call.keywords if k.arg == name]
        return defaults[0] if len(defaults) == 1 else None

    def _is_for_hardware(self, target: ast.Attribute) -> bool:
        """Whether an assignment runs only on a machine without CUDA: on any other the option is what it was."""
        guards = conditions_of(self.script.outline, target)
        return any((_MPS if is_true else _HAS_CUDA).search(text) for text, is_true in guards)

    def _is_copy(self, target: ast.Attribute, spaces: set[str]) -> bool:
        """Whether an assignment copies an option to another object: `cfg.amp = args.amp`."""
        statement = self.script.outline.parents.get(target)
        value = statement.value if isinstance(statement, ast.Assign) else None
        if not isinstance(value, ast.Attribute) or value.attr != target.attr:
            return False
        return _name_of(value.value) in spaces and _name_of(target.value) not in spaces


def names_format(option: ast.Call) -> bool:
    """Whether the choices of an option are number formats: `choices=["fp32", "bf16"]`."""
    choices = {constant(choice) for choice in getattr(argument(option, None, "choices"), "elts", ())}
    return len(choices & _FORMATS) > 1


def is_amplitude(option: ast.Call, name: str) -> bool:
    """Whether an `--amp` is no flag but a quantity: by its help, or by a default that is a number other than 0 and 1."""
    if name.casefold() not in {"amp", "amps"}:
        return False
    default, help_text = (constant(argument(option, None, key)) for key in ("default", "help"))
    is_number = isinstance(default, int | float) and default not in (0, 1)
    return is_number or bool(_AMPLITUDE.search(help_text if isinstance(help_text, str) else ""))


def _sets(call: ast.Call, name: str) -> bool:
    """Whether a call may set a value of the namespace: setattr, set_defaults, an update of its dictionary."""
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if last == "setattr":
        return len(call.args) < 2 or _may_be(call.args[1], name)
    if last == "set_defaults":
        return any(keyword.arg in (None, name) for keyword in call.keywords)
    return last == "update" and any(word in text_of(call.func) for word in ("vars(", "__dict__"))


def _may_be(node: ast.expr, name: str) -> bool:
    """Whether an expression may be a name: a literal is one name, and f"{part}_dir" only those with that ending."""
    if not isinstance(node, ast.JoinedStr):
        return constant(node) in (..., name)
    parts = [re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".*" for v in node.values]
    return re.fullmatch("".join(parts), name) is not None


def stays_here(options: Options) -> bool:
    """Whether the script parses its options and passes the namespace only to its own functions and classes."""
    spaces = _namespaces(options)
    parsers = _parsers(options)
    own = {n.name for n in options.nodes if isinstance(n, _FUNCTIONS)} | _own_classes(options.nodes)
    # `args=(args,)` of spawn passes it too.
    for node in options.nodes:
        if not isinstance(node, ast.Call):
            continue
        values = [*node.args, *(k.value for k in node.keywords)]
        values += [e for v in values if isinstance(v, ast.Tuple | ast.List) for e in v.elts]
        passed = [v for v in values if _name_of(v) in spaces or _is_parsed(v, parsers)]
        starred = [v for v in node.args if isinstance(v, ast.Starred)] + [k for k in node.keywords if k.arg is None]
        last = chain(node.func)[-1:]
        is_known = bool(last) and (
            _is_engine(node.func)
            or last[0] in own | _SHOWS | {"spawn", "Process"}
            or _UNRELATED.search(last[0])
            or _asks_by_name(node, last[0])
            or chain(node.func)[:1] == ("wandb",)
        )
        if passed and not is_known:
            return False
        if any(spaces & {n.id for n in ast.walk(s) if isinstance(n, ast.Name)} for s in starred):
            return False
    return bool(spaces) and not _reads_any(options, spaces)


def _asks_by_name(call: ast.Call, name: str) -> bool:
    """Whether a call is about one attribute, whose name it has as a literal: `hasattr(args, "num_epochs")`."""
    named = call.args[1:2]
    return name in {"hasattr", "getattr", "setattr", "delattr"} and all(isinstance(a, ast.Constant) for a in named)


def _namespaces(options: Options) -> set[str]:
    """The variables that have the parsed options: what `parse_args` returns, copies of it, and parameters that get it."""
    nodes, parsers = options.nodes, _parsers(options)
    spaces: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_parsed(node.value, parsers):
            targets = [
                t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            spaces |= {t.id for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.Call):  # `main(parse_args())`
            spaces |= {p for p, value in _parameters(options, node) if _is_parsed(value, parsers)}
    before = -1
    while spaces and len(spaces) > before:
        before = len(spaces)
        for node in nodes:
            if isinstance(node, ast.Assign):
                spaces |= {
                    name
                    for target, value in _assigned(node)
                    if _name_of(value) in spaces and (name := _name_of(target))
                }
            elif isinstance(node, ast.Call):
                spaces |= {p for p, value in _parameters(options, node) if _name_of(value) in spaces}
    return spaces


def _parsers(options: Options) -> set[str]:
    """The functions of the file that return the parsed options."""
    return {n.name for n in options.nodes if isinstance(n, ast.FunctionDef) and _parses(n)}


def _is_parsed(value: ast.expr, parsers: set[str]) -> bool:
    """Whether a value is what `parse_args` or a function around it returns."""
    func = value.func if isinstance(value, ast.Call) else None
    if isinstance(func, ast.Attribute) and func.attr in {"parse_args", "parse_known_args"}:
        return True
    return isinstance(func, ast.Name | ast.Attribute) and bool(parsers.intersection(chain(func)[-1:]))


def _parameters(options: Options, call: ast.Call) -> list[tuple[str, ast.expr]]:
    """The parameters of a function or class of this file that a call passes something for, each with its value."""
    last = chain(call.func)[-1:]
    named = [
        f for f in options.script.outline.functions if last in {(f.name,), (f.cls if f.name == "__init__" else "",)}
    ]
    pairs = [(k.arg, k.value) for k in call.keywords if k.arg is not None] if named else []
    for function in named:
        params = function.params[1:] if function.method else function.params
        pairs += list(zip(params, call.args, strict=False))
    return pairs


def _name_of(node: ast.AST) -> str:
    """The name of a variable or of an attribute of `self`."""
    return ".".join(chain(node)) if isinstance(node, ast.Name) or chain(node)[:1] == ("self",) else ""


def _own_classes(nodes: tuple[ast.AST, ...]) -> set[str]:
    """The classes of this file that inherit no code which may read options."""
    classes = {n.name: n for n in nodes if isinstance(n, ast.ClassDef)}
    plain = {"object", "Module", "Dataset", "ABC", "IterableDataset"}
    return {
        name
        for name, node in classes.items()
        if all(chain(b)[-1:] and (chain(b)[-1] in plain or chain(b)[-1] in classes) for b in node.bases)
    }


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


def _reads_any(options: Options, spaces: set[str]) -> bool:
    """Whether the namespace is stored where other files can read it, or read by a computed name."""
    own = _own_classes(options.nodes)
    for node in options.nodes:
        if isinstance(node, ast.Assign):
            for target in [target for target, value in _assigned(node) if _name_of(value) in spaces]:
                # `self.args = args` of a class that extends another one: that one may read it.
                is_own = isinstance(target, ast.Name) or (
                    bool(_name_of(target)) and _class_around(options, node) in own
                )
                if not is_own:
                    return True
        last = chain(node.func)[-1:] if isinstance(node, ast.Call) else ()
        is_dictionary = isinstance(node, ast.Attribute) and node.attr == "__dict__" and _name_of(node.value) in spaces
        if (last == ("vars",) or is_dictionary) and not _is_shown(options, node):
            return True  # the dictionary may go anywhere
        if (
            isinstance(node, ast.Call)
            and last == ("getattr",)
            and not all(isinstance(a, ast.Constant) for a in node.args[1:2])
            and (
                not _name_of(node.args[0]) or _name_of(node.args[0]) in spaces
            )  # `getattr(self, name)` is of another object
        ):
            return True
    return False


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment with their values, of `self.args, self.device = args, device` each with its own."""
    for target in node.targets:
        parts = (target, node.value)
        if all(isinstance(part, ast.Tuple) for part in parts):
            yield from zip(*(getattr(part, "elts", ()) for part in parts), strict=False)
        else:
            yield parts


def _class_around(options: Options, node: ast.AST) -> str:
    """The name of the class that a statement is in."""
    parent = options.script.outline.parents.get(node)
    while parent is not None and not isinstance(parent, ast.ClassDef):
        parent = options.script.outline.parents.get(parent)
    return parent.name if isinstance(parent, ast.ClassDef) else ""


def _is_shown(options: Options, node: ast.AST, depth: int = 6) -> bool:
    """Whether a dictionary of all options is only printed, logged or saved, and read by literal keys alone."""
    parents = options.script.outline.parents
    parent = parents.get(node)
    if parent is None or depth == 0:
        return False
    if isinstance(parent, ast.keyword):
        node, parent = parent, parents.get(parent)
        if isinstance(node, ast.keyword) and node.arg is None:
            return False
    if isinstance(parent, ast.Call):
        last = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
        if last in _SHOWS - {"vars", "copy", "deepcopy"}:
            return True
        return last in {"sorted", "list", "dict", "copy", "deepcopy", "enumerate", "join"} and _is_shown(
            options, parent, depth - 1
        )
    if isinstance(parent, ast.Attribute):
        call = parents.get(parent)
        return (
            parent.attr in {"items", "keys", "values", "copy"} and _is_shown(options, call, depth - 1)
            if call
            else False
        )
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.slice, ast.Constant) and isinstance(parent.ctx, ast.Load)
    if isinstance(parent, ast.For):
        calls = [n for s in parent.body for n in ast.walk(s) if isinstance(n, ast.Call)]
        known = _SHOWS - {"vars", "init"}
        is_shown = all(getattr(c.func, "attr", getattr(c.func, "id", "")) in known for c in calls)
        stores = any(isinstance(n, ast.Assign | ast.AugAssign) for s in parent.body for n in ast.walk(s))
        return (is_shown and not stores) or shows_only(parent.body)
    if isinstance(parent, ast.comprehension):
        whole = parents.get(parent)
        return whole is not None and _is_shown(options, whole, depth - 1)
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name) and len(parent.targets) == 1:
        name = parent.targets[0].id
        loads = [n for n in options.nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        return all(_is_shown(options, load, depth - 1) for load in loads)
    return isinstance(parent, ast.FormattedValue | ast.Expr)


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
    # One for a JSON file and one for the command line, into the same variables.
    if len(parsers) != 1 or len({ast.unparse(r.targets[0]) for r in results}) != 1:
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
