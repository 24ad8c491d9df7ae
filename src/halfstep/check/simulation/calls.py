"""What calls give in a simulated run: the script's own functions, torch's, and those of objects that another file created.

An object from elsewhere is taken for what its name says: something called `scaler` whose `step` gets an optimizer is a scaler.
Where such an object, or a loss, goes into code of another file, what that code does with it is not known.
"""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.expressions import combined, merged, unknown
from halfstep.check.simulation.library import Libraries
from halfstep.check.simulation.machine import Machine
from halfstep.check.simulation.values import (
    Class,
    Env,
    Func,
    Instance,
    Library,
    Negated,
    Optimizer,
    Params,
    Partial,
    Scaler,
    Tensor,
    Test,
    Unknown,
    is_plain,
)

__all__ = ["Simulation"]

_OPTIMIZER = regex(r"(^|_)(opt|optim|optimizer|optimiser)(s|_\w+|\d*)?$|^opt[A-Z]|[Oo]ptimi[sz]er")
_SCALER = regex(r"scaler")
_HARMLESS = regex(
    r"sched|config|signature|filter|(^|_)lr|save|load|log|state|checkpoint|ckpt|print|resume|ema|info|count|wandb|append|dict|adjust|warm|repr|format|len|size|param|monitor|restore"
)
_TRAINS = regex(r"backward|step|optimi|scaler|update|train|fit|grad|scale_loss|learn")
_DATA = regex(r"^(item|detach|cpu|numpy|tolist|argmax|max|size|shape|float|int|type|dim)$")
_SAME = {"to", "cuda", "train", "eval", "float", "half", "double", "bfloat16", "requires_grad_", "module", "share_memory", "compile", "cpu"}
_PARAMETERS = {"parameters", "named_parameters", "trainable_parameters", "get_parameters"}
_STABLE = regex(r"^(get|getattr|is_\w+|has_\w+|getboolean|getint|get_\w+|parse_args|parse_known_args|pop)$")


class Simulation(Libraries, Machine):
    """Runs a script: statements, expressions and calls."""

    roots: frozenset[ast.AST] = frozenset()

    def is_root(self, function: Func) -> bool:
        """Whether nothing in the script calls a function."""
        return function.node in self.roots and not self.depth

    def _value_Call(self, node: ast.Call, env: Env) -> Any:  # noqa: N802
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return self._super(env)
        args, kwargs = self._arguments(node, env)
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value, env)
            return self.call_method(base, node.func.attr, args, kwargs, node)
        return self.call(self.value(node.func, env), args, kwargs, node)

    def _super(self, env: Env) -> Any:
        scope: Env | None = env
        while scope is not None:
            owner = scope.variables.get("self")
            if isinstance(owner, Instance):
                bases = [b for b in owner.cls.bases if isinstance(b, Class)]
                return (owner, bases[0]) if bases else Library("super")
            scope = scope.parent
        return Library("super")

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

    # --- functions ----------------------------------------------------------------------------------------------------

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
            return self.forward(function.key, [*args, *kwargs.values()])
        if isinstance(function, Library):
            return self.call_library(function.full, args, kwargs, node)
        if isinstance(function, Unknown):
            return self._call_unknown(function.key, args, kwargs, node)
        if isinstance(function, Tensor):
            return combined(function, *args)
        return Unknown(self.path.fresh("call"))

    def _create(self, cls: Class, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        libraries = {b.full for b in cls.libraries() if isinstance(b, Library)}
        if any("torch.optim" in full or full.endswith("Optimizer") for full in libraries):
            return self.optimizer(cls.node.name, args, node)
        if any(full.endswith((".Module", "LightningModule")) for full in libraries) and not self.relevance.is_acting(cls.node.name):
            trains = any(self.relevance.is_acting(name) and name != "__init__" for name in cls.attributes)
            if not trains:
                return Instance(cls, f"{cls.node.name}@{getattr(node, 'lineno', 0)}")
        return self.create(cls, args, kwargs, node)

    def optimizer(self, name: str, args: list[Any], node: ast.AST) -> Optimizer:
        """A new optimizer over what is passed first."""
        models = self.models_in(args[0]) if args else None
        made = Optimizer(self.target_of(node) or name, models, node)
        self.gradients.optimizers.append(made)
        return made

    def target_of(self, node: ast.AST) -> str:
        """The variable that a call is assigned to, as the text has it."""
        return self.targets.get(node, "")

    targets: dict[ast.AST, str] = {}  # noqa: RUF012 - set once for a script

    def models_in(self, value: Any) -> frozenset[str] | None:
        """The models whose parameters a value has; None: not known."""
        if isinstance(value, Params):
            return value.models
        if isinstance(value, dict):
            return self.models_in(value.get("params")) if "params" in value else None
        if isinstance(value, list | tuple):
            parts = [self.models_in(part) for part in value]
            known = [p for p in parts if p is not None]
            return frozenset().union(*known) if known and len(known) == len(parts) else None
        return None

    def forward(self, key: str, args: list[Any]) -> Tensor:
        """What a model, or a function that is not known, computes from its arguments."""
        if self.has_no_graph():
            return Tensor(frozenset())
        half, region = self.half_here()
        tensors = combined(*args)
        models = None if tensors.models is None else tensors.models | {key} | {a.key for a in args if isinstance(a, Unknown)}
        own = frozenset({key}) if half else frozenset()
        if half is not None and tensors.half is not None:
            half = bool(half or tensors.half)
        else:
            half = None
        return Tensor(models, half, tensors.scaler, tensors.version, tensors.region or region, own | tensors.halved)

    # --- what is not known ----------------------------------------------------------------------------------------------

    def _call_unknown(self, key: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        name = key.rpartition(".")[2]
        every = [*args, *kwargs.values()]
        self.hand_over(name, every)
        if any(self.models_in(a) for a in every) and self._creates_optimizer(key, node):
            return self.optimizer(name, every, node)
        if self._names_object(target := self.target_of(node)):
            return Unknown(target)
        if all(map(is_plain, every)) and _STABLE.search(name):
            return unknown(f"{key}({', '.join(map(repr, args))})")
        if any(isinstance(a, Tensor) for a in every) or (every and not all(map(is_plain, every))):
            return self.forward(key, every)
        return Unknown(self.path.fresh(key))

    def _creates_optimizer(self, key: str, node: ast.AST) -> bool:
        """Whether a function of another file that gets parameters gives an optimizer, by its name or that of its result."""
        name, target = key.rpartition(".")[2], self.target_of(node)
        if "ema" in name.lower():
            return False
        return name[:1].isupper() or "opt" in key.lower() or bool(target and self.is_optimizer(Unknown(target)))

    def _names_object(self, target: str) -> bool:
        """Whether a variable is named like a scaler or an optimizer."""
        return bool(target) and (self.is_scaler(Unknown(target)) or self.is_optimizer(Unknown(target)))

    def hand_over(self, name: str, values: list[Any]) -> None:
        """Code of another file gets these values."""
        if _HARMLESS.search(name.lower()) and "backward" not in name:
            return
        for value in values:
            if isinstance(value, Optimizer):
                self.gradients.lose(optimizer=value)
            elif isinstance(value, Scaler):
                self.gradients.lose(scaler=value)
            elif isinstance(value, Unknown) and (self.is_scaler(value) or self.is_optimizer(value)):
                self.gradients.lose()
            elif isinstance(value, Instance) and value.cls.lookup("forward") is ... and any(
                isinstance(v, Optimizer | Scaler) for v in value.attributes.values()
            ):
                self.gradients.lose()
        losses = (v for v in values if isinstance(v, Tensor) and v.models != frozenset())
        if not name.startswith("on_") and _TRAINS.search(name.lower()) and any(losses):
            self.gradients.lose()

    def is_scaler(self, value: Unknown) -> bool:
        """Whether something that another file created is named like a scaler."""
        return bool(_SCALER.search(value.key.rpartition(".")[2].lower()))

    def is_optimizer(self, value: Unknown) -> bool:
        """Whether something that another file created is named like an optimizer."""
        last = value.key.rpartition(".")[2]
        return bool(_OPTIMIZER.search(last)) and "sched" not in last

    def as_object(self, value: Any) -> Any:
        """The scaler or optimizer that an unknown value is by its name."""
        if not isinstance(value, Unknown):
            return value
        if value.key not in self.objects:
            if self.is_scaler(value):
                made: Any = Scaler(value.key, True, None)
                self.gradients.scalers.append(made)
            elif self.is_optimizer(value):
                made = Optimizer(value.key, None)
                self.gradients.optimizers.append(made)
            else:
                return value
            self.objects[value.key] = made
        return self.objects[value.key]

    def _as_optimizer(self, value: Any) -> Any:
        """What a scaler steps is an optimizer, whatever its name."""
        if isinstance(value, Instance):
            value = Unknown(value.key)
        if isinstance(value, Unknown) and not isinstance(self.as_object(value), Optimizer):
            self.objects[value.key] = Optimizer(value.key, None)
            self.gradients.optimizers.append(self.objects[value.key])
        return self.as_object(value)

    # --- methods --------------------------------------------------------------------------------------------------------

    def call_method(self, base: Any, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """What a call of a method gives."""
        if isinstance(base, tuple) and len(base) == 2 and isinstance(base[1], Class):  # super()
            member = base[1].lookup(name)
            if isinstance(member, Func):
                return self.call_function(Func(member.node, member.env, base[0], member.cls), args, kwargs, node)
            return Unknown(self.path.fresh(name))
        if isinstance(base, Library):
            return self.call_library(f"{base.full}.{name}", args, kwargs, node)
        if isinstance(base, Unknown) and name in {"scale", "unscale_", "step", "update", "zero_grad", "is_enabled", "get_scale"}:
            base = self.as_object(base)
        if isinstance(base, Scaler):
            return self.call_scaler(base, name, args, kwargs, node)
        if isinstance(base, Optimizer):
            return self.call_optimizer(base, name, args, node)
        if isinstance(base, Tensor):
            return self._call_tensor(base, name, args, node)
        if isinstance(base, Instance):
            return self._call_instance(base, name, args, kwargs, node)
        if isinstance(base, Unknown):
            return self._call_unknown_method(base, name, args, kwargs, node)
        if isinstance(base, Params):
            return base
        if isinstance(base, Test | Negated):
            return base
        if isinstance(base, list | dict | str):
            return self._call_native(base, name, args, node)
        if isinstance(base, Class | Func):
            return self.call(self.attribute(base, name, node.func), args, kwargs, node)
        return Unknown(self.path.fresh(name))

    def _call_instance(self, base: Instance, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        if name in base.attributes or base.cls.lookup(name) is not ...:
            return self.call(self.attribute(base, name, node.func), args, kwargs, node)
        if name in _PARAMETERS:
            return Params(frozenset({base.key}))
        if name in _SAME:
            return base
        if name == "zero_grad":
            self.gradients.clear(frozenset({base.key}))
            return None
        if name in {"manual_backward", "backward_pass"}:
            self.gradients.lose()
            return None
        self.hand_over(name, [*args, *kwargs.values()])
        return self.forward(base.key, args) if name.startswith("forward") else Unknown(self.path.fresh(name))

    def _call_tensor(self, base: Tensor, name: str, args: list[Any], node: ast.Call) -> Any:
        if name == "backward":
            self.gradients.backward(base, node)
            return None
        if name in {"detach", "detach_"}:
            return Tensor(frozenset(), base.half, None, 0, base.region)
        return Unknown(self.path.fresh(name)) if _DATA.search(name) and name != "float" else combined(base, *args)

    def _call_unknown_method(self, base: Unknown, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        every = [*args, *kwargs.values()]
        if name in _PARAMETERS:
            return Params(frozenset({base.key}))
        if name in _SAME:
            if name == "requires_grad_":
                self.gradients.is_partial = True
            return base
        if name == "backward":
            if any(isinstance(a, Tensor | Unknown) for a in args):  # an engine's
                self.gradients.lose()
            else:
                self.gradients.backward(Tensor(None, None), node)
            return None
        if name == "zero_grad":
            self.gradients.clear(frozenset({base.key}))
            return None
        if name in {"step", "update"} and (args or not _HARMLESS.search(base.key.lower())):
            if "engine" in base.key or "model" in base.key:
                self.gradients.lose()
            return Unknown(self.path.fresh(name))
        return self._call_unknown(f"{base.key}.{name}", args, kwargs, node) if every or name else base

    def _call_native(self, base: Any, name: str, args: list[Any], node: ast.Call) -> Any:  # noqa: ARG002
        if isinstance(base, list):
            if name == "append" and args:
                base.append(args[0])
                return None
            if name == "extend" and args and isinstance(args[0], list | tuple):
                base.extend(args[0])
                return None
            if name in {"append", "extend"} and args and isinstance(args[0], Params):
                base.append(args[0])
                return None
        if isinstance(base, dict):
            if name == "get" and args and is_plain(args[0]):
                return base.get(args[0], args[1] if len(args) > 1 else None)
            if name in {"items", "values", "keys"}:
                return [*map(tuple, base.items())] if name == "items" else list(getattr(base, name)())
            if name == "update" and args and isinstance(args[0], dict):
                base.update(args[0])
                return None
        if isinstance(base, str) and name in {"lower", "upper", "strip", "startswith", "endswith", "split", "replace"} and all(map(is_plain, args)):
            try:
                return getattr(base, name)(*args)
            except (TypeError, ValueError):
                return Unknown(self.path.fresh(name))
        return Unknown(self.path.fresh(name))

    # --- scalers and optimizers -----------------------------------------------------------------------------------------

    def call_scaler(self, scaler: Scaler, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """A method of a GradScaler."""
        given = args[0] if args else next(iter(kwargs.values()), None)
        if name in {"step", "unscale_"}:
            given = self._as_optimizer(given)
            if isinstance(given, Optimizer) and node.args:
                given.key = ast.unparse(node.args[0])
        scaler.key = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else scaler.key
        is_on = name not in {"is_enabled", "load_state_dict", "state_dict"} and self.truth(scaler.enabled)
        if name == "is_enabled":
            return scaler.enabled
        if name == "scale":
            loss = given if isinstance(given, Tensor) else Tensor(None, None)
            if isinstance(given, list | tuple):
                loss = combined(*given)
            if not is_on:
                # Whether the region is on then is another setting's answer, unless both are written out.
                return loss if scaler.enabled is False else dataclasses.replace(loss, half=loss.half and None)
            return Tensor(loss.models, loss.half, scaler, scaler.version, loss.region)
        if name == "unscale_" and is_on and isinstance(given, Optimizer):
            self.gradients.unscale(scaler, given, node)
        elif name == "step" and isinstance(given, Optimizer):
            (self.gradients.scaler_step(scaler, given, node) if is_on else self.gradients.step(given, node))
        elif name in {"step", "unscale_"}:
            self.gradients.lose()
        elif name == "update" and is_on and not args and not kwargs:
            self.gradients.update(scaler, node)
        elif name == "update" and is_on:
            self.gradients.lose(scaler=scaler)
        return Unknown(self.path.fresh(name))

    def call_optimizer(self, optimizer: Optimizer, name: str, args: list[Any], node: ast.Call) -> Any:
        """A method of an optimizer."""
        if isinstance(node.func, ast.Attribute):
            optimizer.key = ast.unparse(node.func.value)
        if name == "zero_grad":
            self.gradients.clear(None, optimizer)
        elif name == "step" and not args:
            self.gradients.step(optimizer, node)
        elif name not in {"state_dict", "load_state_dict", "add_param_group", "train", "eval"}:
            self.gradients.lose(optimizer=optimizer)
        elif name == "add_param_group":
            optimizer.models = None
        return Unknown(self.path.fresh(name))

    def elements(self, value: Any, limit: int, node: ast.expr) -> list[Any]:
        """What a loop over a value assigns, at most `limit` times unless the values are the script's own."""
        if isinstance(value, list | tuple):
            return list(value[: max(limit, 8)])
        if isinstance(value, dict):
            return list(value)[:8]
        if isinstance(value, Params):
            return [value] * min(limit, 2)
        if isinstance(value, range):
            return list(value[:limit]) if len(value) > limit else list(value)
        return [self._element(value, node) for _ in range(limit)]

    def _element(self, value: Any, node: ast.expr) -> Any:
        if isinstance(value, Partial) and value.function == "enumerate":
            count = value.args[1]
            value.args[1] = count + 1 if isinstance(count, int) else count
            return (count, self._element(value.args[0], node))
        if isinstance(value, Partial) and value.function == "range":
            first = value.args[0]
            if not isinstance(first, int):
                return Unknown(self.path.fresh("index"))
            value.args[0] = first + 1
            return first
        if isinstance(value, Params):
            return value
        return Unknown(self.path.fresh("batch"))

    def entered(self, context: Any, node: ast.expr) -> Any:
        """What `with context as value` assigns."""
        if isinstance(context, Tensor):  # amp.scale_loss of Apex
            return context
        return context if isinstance(context, Instance | Unknown) else Unknown(self.path.fresh("context"))


_ = merged
