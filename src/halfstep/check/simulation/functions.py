"""Calls of the script's own functions and classes."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any, TypeGuard

from halfstep.check.simulation.aliases import called_name
from halfstep.check.simulation.contexts import Left
from halfstep.check.simulation.decisions import Decisions
from halfstep.check.simulation.values import (
    Autocast,
    Class,
    Env,
    Func,
    Instance,
    Library,
    NoGrad,
    Partial,
    Super,
    Suspended,
    Tensor,
    Unknown,
)

__all__ = ["Functions"]

MAX_DEPTH = 14  # of calls
_DATA = ("NamedTuple", "BaseModel", "BaseSettings")  # bases of classes that are created from their fields


class Functions(Decisions):
    """Calls what the script defines."""

    def _value_Call(self, node: ast.Call, env: Env) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return self._super(env)
        args, kwargs = self._arguments(node, env)
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value, env)
            return self.call_method(base, node.func.attr, args, kwargs, node)
        return self.call(self.value(node.func, env), args, kwargs, node)

    def _super(self, env: Env) -> Any:
        """The classes after the one that defines the method, in the order of the object's own class."""
        scope: Env | None = env
        while scope is not None and scope.method is None:
            scope = scope.parent
        method = scope.method if scope is not None else None
        if method is None or method.cls is None or not isinstance(method.owner, Instance):
            return Library("super")
        lineage = method.owner.cls.lineage()
        after = lineage[lineage.index(method.cls) + 1 :] if method.cls in lineage else []
        return Super(method.owner, tuple(after)) if after else Library("super")

    def _arguments(self, node: ast.Call, env: Env) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        for part in node.args:
            value = self.value(part, env)
            if isinstance(part, ast.Starred) and isinstance(value, list | tuple):
                args += value
            else:
                args.append(value)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, env)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif isinstance(value, dict) and all(isinstance(k, str) for k in value):
                kwargs |= value
            else:
                kwargs[""] = value  # unknown names
        return args, kwargs

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a call gives."""
        if isinstance(function, Partial):
            return self.call(function.function, [*function.args, *args], function.kwargs | kwargs, node)
        if isinstance(function, Func):
            return self.call_function(function, args, kwargs, node)
        if isinstance(function, Class):
            return self._create(function, args, kwargs, node)
        if isinstance(function, Instance):
            own = function.cls.lookup("__call__")
            if isinstance(own, Func):
                return self.call_function(Func(own.node, own.env, function, own.cls), args, kwargs, node)
            return self._forward_of(function, args, kwargs, node)
        if isinstance(function, Library):
            return self.call_library(function.full, args, kwargs, node)
        if isinstance(function, Unknown):
            return self.call_unknown(function.key, args, kwargs, node)
        if isinstance(function, Tensor):  # what another file's function gave was a model
            return self.forward(
                ast.unparse(node.func) if isinstance(node, ast.Call) else "", [function, *args, *kwargs.values()]
            )
        return Unknown(self.path.fresh("call"))

    def _forward_of(self, module: Instance, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Tensor:
        """What a module of the script computes; its `forward` is run if it opens a region of its own."""
        own = module.cls.lookup("forward")
        result = None
        if isinstance(own, Func) and self.relevance.acts(own.node):
            result = self.call_function(Func(own.node, own.env, module, own.cls), args, kwargs, node)
        inside = result if isinstance(result, Tensor) else None
        if inside is not None and inside.half:
            inside = dataclasses.replace(inside, halved=inside.halved | {module.key})
        return self.forward(module.key, [*args, *kwargs.values(), *([inside] if inside is not None else [])])

    def call_function(self, function: Func, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function of the script returns."""
        if len(self.active) >= MAX_DEPTH or function.node in self.active:
            return Unknown(self.path.fresh("recursion"))
        if _is_abstract(function.node, function):
            return self.call_unknown(f"self.{function.node.name}", args, kwargs, node)
        if self.relevance.yields(function.node):
            is_context = any("contextmanager" in ast.unparse(d) for d in getattr(function.node, "decorator_list", ()))
            if is_context or self.relevance.acts(function.node):
                return Suspended(function, args, kwargs, node)
            return Unknown(self.path.fresh(getattr(function.node, "name", "generator")))
        return self.run_function(function, args, kwargs, node)

    def run_function(self, function: Func, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """Run the statements of a function."""
        if function.node in self.active:
            return Unknown(self.path.fresh("recursion"))
        depth, env = len(self.regions), self.bind(function, args, kwargs)
        self.active.append(function.node)
        self.sites.append(node)
        self.entered.add(function.node)
        try:
            if isinstance(function.node, ast.Lambda):
                return self.value(function.node.body, env)
            self._enter_decorators(function.node.decorator_list, function.env)
            self.run(function.node.body, env)
        except Left as left:
            return left.value
        finally:
            self.active.pop()
            self.sites.pop()
            del self.regions[depth:]
        return None

    def _enter_decorators(self, decorators: list[ast.expr], env: Env) -> None:
        for decorator in decorators:
            if self.relevance.defines(called_name(decorator.func if isinstance(decorator, ast.Call) else decorator)):
                continue
            region = self.value(decorator, env)
            if isinstance(region, Library):  # without parentheses
                region = self.call(region, [], {}, decorator)
            if isinstance(region, Autocast | NoGrad):
                self.regions.append(region)

    def create(self, cls: Class, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """An object of a class of the script."""
        name = cls.node.name
        instance = Instance(cls, self.path.fresh(name))
        for each in reversed(cls.lineage()):
            for key, value in each.attributes.items():
                if not isinstance(value, Func):
                    instance.attributes[key] = value
        is_data = any("dataclass" in ast.unparse(d) for d in cls.node.decorator_list)
        if is_data or any(ast.unparse(base).endswith(_DATA) for base in cls.node.bases):
            # Any field may be given by the caller; what this call passes is known.
            for key in instance.attributes:
                instance.attributes[key] = Unknown(f"{name}.{key}")
            instance.attributes |= dict(zip(_fields(cls), args, strict=False)) | kwargs
            if isinstance(after := cls.lookup("__post_init__"), Func):
                self.call_function(Func(after.node, after.env, instance, after.cls), [], {}, node)
            return instance
        constructor = cls.lookup("__init__")
        if isinstance(constructor, Func):
            self.call_function(Func(constructor.node, constructor.env, instance, constructor.cls), args, kwargs, node)
        instance.is_built = True
        return instance

    def bind(self, function: Func, args: list[Any], kwargs: dict[str, Any]) -> Env:
        """The variables of a function at its start."""
        spec = function.node.args
        env = Env(
            function.env, local=self.relevance.locals_of(function.node), method=function if function.cls else None
        )
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        if function.owner is not None and names:
            args = [function.owner, *args]
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        for name, value in zip(names, args, strict=False):
            env.variables[name] = value
        if spec.vararg is not None:
            env.variables[spec.vararg.arg] = list(args[len(names) :])
        known = {*names, *(a.arg for a in spec.kwonlyargs)}
        env.variables |= {k: v for k, v in kwargs.items() if k in known}
        for name in known - env.variables.keys():
            is_open = None in kwargs or "" in kwargs or self.is_root(function)
            env.variables[name] = (
                self.value(defaults[name], function.env) if name in defaults and not is_open else Unknown(name)
            )
        if spec.kwarg is not None:
            is_open = None in kwargs or "" in kwargs or self.is_root(function)
            others = {k: v for k, v in kwargs.items() if k not in known}
            env.variables[spec.kwarg.arg] = Unknown(self.path.fresh(spec.kwarg.arg)) if is_open else others
        return env

    def _create(self, cls: Class, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        libraries = {b.full for b in cls.libraries() if isinstance(b, Library)}
        if any("torch.optim" in full or full.endswith("Optimizer") for full in libraries):
            return self.optimizer(cls.node.name, args, node)
        if any(full.endswith((".Module", "LightningModule")) for full in libraries) and not self.relevance.is_acting(
            cls.node.name
        ):
            trains = any(self.relevance.is_acting(name) and name != "__init__" for name in cls.attributes)
            if not trains:
                return Instance(cls, f"{cls.node.name}@{self.place_of(node)}")
        return self.create(cls, args, kwargs, node)


def _fields(cls: Class) -> list[str]:
    """The names of the fields of a dataclass or a NamedTuple, in the order in which it is created from values."""
    parts = [part for each in reversed(cls.lineage()) for part in each.node.body]
    names = [p.target.id for p in parts if isinstance(p, ast.AnnAssign) and isinstance(p.target, ast.Name)]
    return list(dict.fromkeys(names))


def _is_abstract(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, function: Func
) -> TypeGuard[ast.FunctionDef]:
    """Whether a method is for subclasses to define: it only raises NotImplementedError, or does nothing."""
    if isinstance(node, ast.Lambda):
        return False
    body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    if not body or all(
        isinstance(part, ast.Pass) or (isinstance(part, ast.Return) and part.value is None) for part in body
    ):
        return function.cls is not None and node.name != "__init__"
    return len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplemented" in ast.unparse(body[0])
