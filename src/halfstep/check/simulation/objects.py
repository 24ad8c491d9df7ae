"""Methods of a simulated run: those of scalers, optimizers, losses and objects of the script."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.decisions import HAS_CUDA, Decisions
from halfstep.check.simulation.foreign import HARMLESS
from halfstep.check.simulation.gradients import Raised
from halfstep.check.simulation.operators import divided
from halfstep.check.simulation.paths import PRECISION
from halfstep.check.simulation.values import (
    Autocast,
    Class,
    Func,
    Instance,
    Library,
    Negated,
    NoGrad,
    Optimizer,
    Params,
    Scaler,
    Super,
    Tensor,
    Test,
    Unknown,
    combined,
    is_module,
)

__all__ = ["Objects"]

_AMP = regex(r"^setting |(^|[._])(amp|fp16|half|mixed|autocast|precision)\w*$")
_DATA = regex(r"^(item|detach|cpu|numpy|tolist|argmax|max|any|all|isnan|isinf|isfinite|size|shape|float|int|type|dim)$")
_OWN = regex(r"^\w+@\d+:\d+")  # a model of a class of the script
_SAME_OBJECT = {
    "to", "cuda", "train", "eval", "float", "half", "double", "bfloat16", "requires_grad_", "module", "share_memory", "compile", "cpu",
}  # fmt: skip
# By these methods an object of another file is known to be a scaler or an optimizer, if it is named like one.
_OF_SCALERS = {"scale", "unscale_", "step", "update", "zero_grad", "is_enabled", "get_scale"}
_OF_MODELS = {
    "parameters",
    "named_parameters",
    "zero_grad",
    "train",
    "eval",
    "state_dict",
    "load_state_dict",
    "modules",
}
_LOWERS = {"half", "bfloat16", "to"}
_PARAMETERS = {"parameters", "named_parameters", "trainable_parameters", "get_parameters"}


class Objects(Decisions):
    """Calls methods."""

    def call_method(self, base: Any, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """What a call of a method gives."""
        if isinstance(base, Super):
            member = base.lookup(name)
            if isinstance(member, Func):
                return self.call_function(Func(member.node, member.env, base.owner, member.cls), args, kwargs, node)
            return Unknown(self.path.fresh(name))
        if isinstance(base, Autocast | NoGrad):
            self._enter_or_leave(base, name)
            return base
        if name == "enter_context" and args:
            return self.enter(args[0])
        if isinstance(base, Library):
            return self.call_library(f"{base.full}.{name}", args, kwargs, node)
        if isinstance(base, Tensor) and name in _OF_SCALERS and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)  # what another file's function gave was a scaler or an optimizer
            base = Unknown(owner) if self.names_object(owner) else base
        if isinstance(base, Unknown) and name in _OF_SCALERS:
            base = self.as_object(base, name)
        if base is None and name in _OF_SCALERS and isinstance(node.func, ast.Attribute):
            self._call_none(node.func)
        if isinstance(base, Tensor) and name in _OF_MODELS and isinstance(node.func, ast.Attribute):
            base = Unknown(ast.unparse(node.func.value))  # what another file's function gave was a model
        if (
            name == "requires_grad_"
            and isinstance(base, Unknown | Instance | Params)
            and isinstance(node.func, ast.Attribute)
        ):
            self._set_requires_grad(base, args[0] if args else kwargs.get("requires_grad", True), node.func)
            return base
        if name == "zero_grad" and not isinstance(base, Optimizer | Instance | Unknown):
            self.gradients.clear(None)
            return None
        if name in _LOWERS and (name != "to" or any(isinstance(a, Library) for a in [*args, *kwargs.values()])):
            self.has_lowered = True
        if isinstance(base, Autocast | NoGrad) and name == "__enter__":
            self.opened.append(base)
            return None
        if name == "enter_context" and args and isinstance(args[0], Autocast | NoGrad):
            self.opened.append(args[0])
        if isinstance(base, Scaler):
            return self.call_scaler(base, name, args, kwargs, node)
        if isinstance(base, Optimizer):
            return self.call_optimizer(base, name, args, node)
        if isinstance(base, Tensor):
            return self._call_tensor(base, name, args, kwargs, node)
        if isinstance(base, Instance):
            return self._call_instance(base, name, args, kwargs, node)
        if isinstance(base, Unknown):
            return self._call_unknown_method(base, name, args, kwargs, node)
        if isinstance(base, Params):
            return base
        if isinstance(base, Test | Negated):
            return base
        if isinstance(base, list | dict | str):
            return self.call_native(base, name, args)
        if isinstance(base, Class | Func):
            return self.call(self.attribute(base, name, node.func), args, kwargs, node)
        return Unknown(self.path.fresh(name))

    def _enter_or_leave(self, region: Autocast | NoGrad, name: str) -> None:
        """A region that is entered without `with`."""
        if name == "__enter__":
            self.opened.append(region)
        elif name == "__exit__" and region in self.opened:
            self.opened.remove(region)

    def _set_requires_grad(self, base: Unknown | Instance | Params, flag: Any, func: ast.Attribute) -> None:
        """`model.requires_grad_()`, or that of a parameter in a loop."""
        is_one = isinstance(base, Params)
        models = base.models if isinstance(base, Params) else frozenset({base.key})
        self.gradients.frozen.set(models, flag, is_all=not is_one or self.relevance.is_of_all_parameters(func))

    def _call_none(self, func: ast.Attribute) -> None:
        """A method of a scaler that is None, where nothing was asked about precision since it was assigned."""
        name = ast.unparse(func.value)
        since = self.none_since.get(name.rpartition(".")[2])
        needs_cuda = self.path.answers.get(HAS_CUDA) == 1  # a script for CUDA need not run without it
        if since is None or needs_cuda or any(PRECISION.search(question) for question, _, _ in self.path.taken[since:]):
            return
        self.gradients.is_none(name, func)
        raise Raised

    def _call_instance(self, base: Instance, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        if name in base.attributes or base.cls.lookup(name) is not ...:
            return self.call(self.attribute(base, name, node.func), args, kwargs, node)
        if name in _PARAMETERS:
            return Params(frozenset({base.key}))
        if name in _SAME_OBJECT:
            return base
        if name == "zero_grad":
            self.gradients.clear(frozenset({base.key}), node=node)
            return None
        if name in {"manual_backward", "backward_pass"}:
            self.gradients.lose()
            return None
        every = [*args, *kwargs.values()]
        if is_module(base.cls):  # a submodule, perhaps: torch's own methods do not train
            return self.forward(f"{base.key}.{name}", every)
        if self.may_train(name):  # a hook, or a method of an unknown base class
            self.gradients.lose()
        is_computed = name.startswith("forward") or any(isinstance(a, Tensor) for a in every)
        return self.forward(base.key, every) if is_computed else Unknown(self.path.fresh(name))

    def _call_tensor(self, base: Tensor, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        if name == "backward":
            reached = self.models_in(kwargs.get("inputs"))
            self.gradients.backward(base if reached is None else dataclasses.replace(base, models=reached), node)
            return None
        if name in {"detach", "detach_"}:
            return Tensor(frozenset())  # no gradient passes, whatever it was computed in
        if name in {"div", "div_", "mul", "mul_", "true_divide"} and args:
            return divided(combined(base, *args), ast.Mult() if name.startswith("mul") else ast.Div(), args[0])
        return Unknown(self.path.fresh(name)) if _DATA.search(name) and name != "float" else combined(base, *args)

    def _call_unknown_method(
        self, base: Unknown, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call
    ) -> Any:
        every = [*args, *kwargs.values()]
        if name in _PARAMETERS:
            return Params(frozenset({base.key}))
        if name in _SAME_OBJECT:
            return base
        if name == "backward":
            if any(isinstance(a, Tensor | Unknown) for a in args):  # an engine's
                self.gradients.lose()
            else:
                self.gradients.backward(self.gradients.lost_loss(), node)
            return None
        if name == "zero_grad":
            self.gradients.clear(frozenset({base.key}), node=node)
            return None
        if name in {"step", "update"} and (args or not HARMLESS.search(base.key.lower())):
            if "engine" in base.key or "model" in base.key:
                self.gradients.lose()
            is_loss = any(isinstance(a, Tensor) for a in every)
            return self.forward(base.key, every) if is_loss else Unknown(self.path.fresh(name))
        return self.call_unknown(f"{base.key}.{name}", args, kwargs, node)

    def call_scaler(self, scaler: Scaler, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """A method of a GradScaler."""
        passed = args[0] if args else next(iter(kwargs.values()), None)
        if name in {"step", "unscale_"}:
            passed = self.as_optimizer(passed, ast.unparse(node.args[0]) if node.args else "optimizer")
            if isinstance(passed, Optimizer) and node.args:
                passed.key = ast.unparse(node.args[0])
        scaler.key = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else scaler.key
        is_on = name not in {"is_enabled", "load_state_dict", "state_dict"} and self._is_on(scaler)
        if name == "is_enabled":
            return scaler.enabled
        if name == "scale":
            if is_on and isinstance(passed, Tensor):
                self._note_float32(scaler, passed, node)
            return self._scaled(scaler, passed, is_on=is_on)
        if name == "unscale_" and is_on and isinstance(passed, Optimizer):
            self.gradients.unscale(scaler, passed, node)
        elif name == "step" and isinstance(passed, Optimizer):
            (self.gradients.scaler_step(scaler, passed, node) if is_on else self.gradients.step(passed, node))
        elif name in {"step", "unscale_"} and not isinstance(passed, Optimizer):
            self.gradients.lose()
        elif name == "update" and is_on and not args and not kwargs:
            self.gradients.update(scaler, node)
        elif name == "update" and is_on:
            self.gradients.lose(scaler=scaler)
        return Unknown(self.path.fresh(name))

    def _is_on(self, scaler: Scaler) -> bool:
        """Whether a scaler is enabled; without CUDA, one for CUDA disables itself, and one of another file may be off with AMP."""
        if scaler.node is None and any(
            _AMP.search(question) and option for question, option in self.path.answers.items()
        ):
            return False
        has_cuda = self.path.answers.get(HAS_CUDA) != 1
        return (has_cuda or not scaler.is_for_cuda) and self.truth(scaler.enabled)

    def _scaled(self, scaler: Scaler, loss: Any, *, is_on: bool) -> Tensor:
        """`scaler.scale(loss)`."""
        if isinstance(loss, list | tuple):
            loss = combined(*loss)
        tensor = loss if isinstance(loss, Tensor) else self.gradients.lost_loss()
        if is_on:
            self.gradients.scale(scaler, tensor)
            return dataclasses.replace(tensor, scaler=scaler, version=scaler.version)
        if self._is_always_half(tensor.region, scaler):
            return tensor
        # Whether the region is on then is another setting's answer.
        return dataclasses.replace(tensor, formats=tensor.formats | {""})

    def _note_float32(self, scaler: Scaler, loss: Tensor, node: ast.Call) -> None:
        """A loss that models of the script have computed outside every region, in a run that has asked for no format."""
        is_known = scaler.enabled is True and scaler.node is not None and not self.has_lowered and not loss.formats
        if not is_known or loss.models is None or not any(map(_OWN.search, loss.models)):
            return
        names = {key.partition("@")[0] for key in loss.models if not key.startswith("batch#")}
        if names <= self.relevance.classes and not any(_AMP.search(question) for question in self.path.answers):
            self.gradients.note_float32(scaler, node)

    def _is_always_half(self, region: ast.AST | None, scaler: Scaler) -> bool:
        """Whether a float16 region is on whatever a setting is, in a run where nothing else was asked about precision."""
        if not isinstance(region, ast.Call) or self.path.answers.get(HAS_CUDA) == 1:
            return False
        fixed = [k.value for k in region.keywords if k.arg in {"enabled", "dtype"}]
        own = scaler.enabled.question if isinstance(scaler.enabled, Test) else getattr(scaler.enabled, "key", "")
        others = {q for q in self.path.answers if _AMP.search(q) and q != own}
        return not others and all(isinstance(v, ast.Constant | ast.Attribute) and _names_fixed(v) for v in fixed)

    def call_optimizer(self, optimizer: Optimizer, name: str, args: list[Any], node: ast.Call) -> Any:
        """A method of an optimizer."""
        if isinstance(node.func, ast.Attribute):
            optimizer.key = ast.unparse(node.func.value)
        if name == "zero_grad":
            self.gradients.clear(None, optimizer, node)
        elif name == "step" and not args:
            self.gradients.step(optimizer, node)
        elif name not in {"state_dict", "load_state_dict", "add_param_group", "train", "eval"}:
            self.gradients.lose(optimizer=optimizer)
        elif name == "add_param_group":
            optimizer.models = None
        return Unknown(self.path.fresh(name))


def _names_fixed(node: ast.expr) -> bool:
    """Whether an argument of a region is True, or float16 by its name."""
    return getattr(node, "value", None) is True or getattr(node, "attr", "") in {"float16", "half"}
