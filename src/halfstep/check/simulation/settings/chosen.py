"""Runs of a script with chosen settings: those of its command line, its environment and its dataclasses.

Other runs take a setting as unknown and decide what a test of it gives, so that two flags may disagree which no user sets so. With
the defaults, or one precision setting changed, everything that is computed from settings is known: what a table of dtypes gives,
the methods of an enum, the flag of a scaler.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from halfstep.check.simulation.settings.annotated import annotations_of, is_settings, names_in
from halfstep.check.simulation.settings.enums import Enums, is_enum
from halfstep.check.simulation.settings.foreign_formats import ForeignFormats
from halfstep.check.simulation.settings.offers import Offers
from halfstep.check.simulation.typed import Typed
from halfstep.check.simulation.values import (
    Class,
    Env,
    Func,
    Instance,
    Library,
    Scaler,
    Tensor,
    Test,
    Unknown,
    is_plain,
)

__all__ = ["ChosenRun", "is_command"]

_GROUPS = {"add_argument_group", "add_mutually_exclusive_group", "add_subparsers", "add_parser"}
_PARSES = {"parse_args", "parse_known_args", "parse_intermixed_args"}
_ENVIRONMENT = {"os.environ.get", "os.getenv", "environ.get", "getenv"}
_CREATES = {"cli", "parse", "parse_args", "structured", "from_cli", "parse_args_into_dataclasses"}
_CALLS = {"fire.Fire", "typer.run", "tyro.cli"}
_OPTIONS = {"option", "argument"}
_COMMANDS = {"command", "option", "argument"}
_OF_SCALERS = {"scale", "unscale_", "step", "update", "state_dict", "load_state_dict", "get_scale", "is_enabled"}
_NONE = object()


class _Parser:
    """A command line: its options with their values in this run."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.choices: dict[str, list[Any]] = {}
        self.classes: list[Class] = []  # dataclasses that it fills


class _Field:
    """A field of a dataclass with its default."""

    def __init__(self, default: Any) -> None:
        self.default = default


class ChosenRun(Typed, Enums, ForeignFormats):
    """A run in which settings have values."""

    def __init__(self, offers: Offers, *args: Any) -> None:
        super().__init__(*args)
        self.offers = offers
        self._passed: dict[Class, Instance] = {}  # the settings that another file passes
        self._namespace = Class(ast.ClassDef("Namespace", [], [], [], []), (Library("argparse.Namespace"),), {})

    def knows(self, test: ast.expr, env: Env) -> bool:
        """Whether a test has a value."""
        value = self.value(test, env)
        return is_plain(value) and not isinstance(value, tuple | list)

    # --- libraries ----------------------------------------------------------------------------------------------------------

    def call_library(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a library gives for the settings of this run."""
        last = full.rpartition(".")[2]
        if last.endswith("ArgumentParser") or (last == "ArgParser" and not full.startswith("torch")):
            parser = _Parser()
            first = args[0] if args else None
            parser.classes = [
                c for c in (first if isinstance(first, list | tuple) else [first]) if isinstance(c, Class)
            ]
            return parser
        if full in _ENVIRONMENT and len(args) > 1 and isinstance(args[0], str):
            return self.offers.value(args[0], args[1]) if is_plain(args[1]) else args[1]
        if full.startswith("dataclasses.field") or last == "field":
            return _Field(self._default_of(kwargs, node))
        if last in {"Option", "Argument", "Field"} and args and full.startswith(("typer", "pydantic")):
            return args[0]
        if full in _CALLS and args and isinstance(args[0], Func):
            return self.call_function(args[0], [], {}, node)
        if last in _CREATES and (classes := [a for a in [*args, *kwargs.values()] if isinstance(a, Class)]):
            return self.create(classes[0], [], {}, node)
        if full == "vars" and args and isinstance(args[0], Instance):
            return args[0].attributes
        if last == "Choice" and args:
            return args[0]
        if full == "dataclasses.asdict" and args and isinstance(args[0], Instance):
            return dict(args[0].attributes)
        return super().call_library(full, args, kwargs, node)

    def _default_of(self, kwargs: dict[str, Any], node: ast.AST) -> Any:
        if "default" in kwargs:
            return kwargs["default"]
        factory = kwargs.get("default_factory")
        if isinstance(factory, Func | Class):
            return self.call(factory, [], {}, node)
        return _NONE

    def _builtin_int(self, args: list[Any], node: ast.AST) -> Any:
        if args and isinstance(args[0], str):
            try:
                return int(args[0])
            except ValueError:
                return Unknown(self.path.fresh("number"))
        return super()._builtin_int(args, node)

    def _builtin_list(self, args: list[Any], node: ast.AST) -> Any:
        return super()._builtin_list([self.sequence(args[0])], node) if args else []

    # --- objects ------------------------------------------------------------------------------------------------------------

    def call_method(self, base: Any, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """A method of a command line, or of anything else."""
        if base is None and name in _OF_SCALERS and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if "scaler" in owner.rpartition(".")[2].lower():
                self.gradients.is_none(owner, node.func)
        if not isinstance(base, _Parser):
            return super().call_method(base, name, args, kwargs, node)
        if name == "add_argument":
            self._add(base, args, kwargs, node)
        elif name == "add_arguments" and args and isinstance(args[0], Class):
            base.values[str(kwargs.get("dest", args[-1]))] = self.create(args[0], [], {}, node)
        elif name == "set_defaults":
            base.values |= {key: self.offers.value(key, value) for key, value in kwargs.items()}
        elif name in _GROUPS:
            return base
        elif name == "parse_args_into_dataclasses":
            return tuple(self.create(cls, [], {}, node) for cls in base.classes)
        elif name in _PARSES:
            made = Instance(self._namespace, self.path.fresh("args"), dict(base.values), is_built=True)
            return (made, []) if name == "parse_known_args" else made
        return Unknown(self.path.fresh(name))

    def _add(self, parser: _Parser, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> None:
        """`parser.add_argument("--amp", action="store_true")`."""
        flags = [a for a in args if isinstance(a, str)]
        if not flags:
            return
        longest = next((f for f in flags if f.startswith("--")), flags[0])
        dest = str(kwargs.get("dest", longest.lstrip("-"))).replace("-", "_")
        action = kwargs.get("action")
        is_given = "default" in kwargs
        if action in {"store_true", "store_false"}:
            default: Any = kwargs.get("default", action == "store_false")
        elif is_given:
            default = kwargs["default"]
        elif kwargs.get("required") or not longest.startswith("-"):
            default = Unknown(f"args.{dest}")
        else:
            default = None
        choices = self.sequence(kwargs.get("choices", []))
        values = choices if isinstance(choices, list | tuple) else []
        convert = kwargs.get("type")
        own = self._setting(dest, default, values)
        if isinstance(own, str) and isinstance(convert, Func | Class | Library):
            own = self.call(convert, [own], {}, node)
        parser.values[dest] = own

    def _setting(self, name: str, default: Any, choices: Sequence[Any]) -> Any:
        """The value of a setting; one with a member of an enum as its default may have the others."""
        if isinstance(default, Instance) and is_enum(default.cls):
            choices = self.sequence(default.cls)
        return self.offers.value(name, default, choices)

    def create(self, cls: Class, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """An object; one of a dataclass with its defaults."""
        made = super().create(cls, args, kwargs, node)
        if not isinstance(made, Instance) or made.is_built:
            return made
        passed = {key for key, value in made.attributes.items() if value != Unknown(f"{cls.node.name}.{key}")}
        for key, value in ((k, v) for each in reversed(cls.lineage()) for k, v in each.attributes.items()):
            default = value.default if isinstance(value, _Field) else value
            if isinstance(default, Func) or key in passed or default is _NONE or isinstance(default, Unknown):
                continue
            is_setting = is_settings(cls.node)
            made.attributes[key] = self._setting(key, default, self._literals(cls, key)) if is_setting else default
        made.is_built = True
        last = cls.lookup("__post_init__")
        if isinstance(last, Func):
            self.call_function(Func(last.node, last.env, made, last.cls), [], {}, node)
        return made

    def _literals(self, cls: Class, name: str) -> list[Any]:
        """The values that the type of a field names: `Literal["fp16", "bf16"]`, or an enum."""
        for part in (part for each in cls.lineage() for part in each.node.body):
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id == name:
                names = [n for n in ast.walk(part.annotation) if isinstance(n, ast.Subscript)]
                literal = next((n for n in names if ast.unparse(n.value).endswith("Literal")), None)
                inside = ast.walk(literal.slice) if literal is not None else ()
                return [n.value for n in inside if isinstance(n, ast.Constant)]
        return []

    def bind(self, function: Func, args: list[Any], kwargs: dict[str, Any]) -> Env:
        """The variables of a function; those of a command have the values of its options."""
        env = super().bind(function, args, kwargs)
        if self.is_root(function):
            self._pass_settings(function, env)
        decorators = function.node.decorator_list if not isinstance(function.node, ast.Lambda) else []
        names = {_name(d.func) for d in decorators if isinstance(d, ast.Call)}
        is_main = not args and not kwargs
        if not is_main or not names & _COMMANDS:
            return env
        spec = function.node.args
        named = [*spec.posonlyargs, *spec.args]
        defaults = dict(zip((a.arg for a in reversed(named)), reversed(spec.defaults), strict=False))
        defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        for name, default in defaults.items():
            env.variables[name] = self._setting(name, self.value(default, function.env), [])
        parser = _Parser()
        for each in decorators:
            if isinstance(each, ast.Call) and _name(each.func) in _OPTIONS:
                options, more = self._arguments(each, function.env)
                if more.pop("is_flag", False):
                    more["action"] = "store_true"
                flags = [o.partition("/")[0] for o in options if isinstance(o, str)]
                if isinstance(more.get("type"), list | tuple):
                    more["choices"] = more.pop("type")
                self._add(parser, flags, more, each)
        env.variables |= {key: value for key, value in parser.values.items() if key in env.variables}
        return env

    def _pass_settings(self, function: Func, env: Env) -> None:
        """The settings that another file passes are those of this run."""
        for name, annotation in annotations_of(function.node):
            made = (self.value(ast.Name(each, ast.Load()), function.env) for each in names_in(annotation))
            cls = next((each for each in made if isinstance(each, Class) and is_settings(each.node)), None)
            if cls is None or not isinstance(env.variables.get(name), Unknown):
                continue
            if cls not in self._passed:
                self._passed[cls] = self.create(cls, [], {}, function.node)
            env.variables[name] = self._passed[cls]

    # --- what is known now --------------------------------------------------------------------------------------------------

    def _decide_test(self, test: Test, default: int, *, is_firm: bool) -> bool:
        is_cuda = isinstance(test.other, str) and test.other.startswith("cuda")
        return super()._decide_test(test, 0 if is_cuda else default, is_firm=is_firm)

    def _scaled(self, scaler: Scaler, loss: Any, *, is_on: bool) -> Tensor:
        """`scaler.scale(loss)`; whether a region is on where the scaler is off is known."""
        if is_on or scaler.enabled is not False or not isinstance(loss, Tensor):
            return super()._scaled(scaler, loss, is_on=is_on)
        return loss


def _name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def is_command(function: ast.AST) -> bool:
    """Whether a function is run from a command line by its decorators: `@app.command()`."""
    decorators = getattr(function, "decorator_list", ())
    return any(isinstance(d, ast.Call) and _name(d.func) in _COMMANDS for d in decorators)
