"""Which calls matter, and what they do: scale, backward, unscale, clip, step, update, checkpoint, cast.

A method name alone decides little (`step` belongs to optimizers, schedulers, environments and scalers), so each call is
interpreted with what is known about its receiver: how it was created, how else it is used in the file, and last its name.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from halfstep.check.regex import regex
from halfstep.check.script.flow.passing import returns_scaler, scales_by_hand, stores
from halfstep.check.script.objects.expressions import arguments_of, first_key, hand_scaled, models_in, options_of
from halfstep.check.script.objects.losses import BCE, bce_of, may_be_scaled
from halfstep.check.script.objects.modules import OWN_LOSS, WRAPS, is_part, models_by_use, owners_of_models, run_by_call
from halfstep.check.script.objects.saving import is_setting, looped_objects, passed_objects, restores, saves
from halfstep.check.script.objects.tensors import adds_unscaled, is_gradient, reads_gradients, tensor_of
from halfstep.check.script.objects.values import DTYPES, argument, constant, make_scaler
from halfstep.check.script.scaling.lightning_optimizers import names_optimizer
from halfstep.check.script.scaling.schedules import called_name, looped_calls, schedules_value, sets_rate, stored_in
from halfstep.check.script.syntax.names import called_key, key_of
from halfstep.check.script.syntax.names import last_name as _last
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scaler_class import data_scalers, is_data_scaler

__all__ = ["Action", "Recogniser"]

CLIPS = {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "dispatch_clip_grad", "adaptive_clip_grad"}
_READS = {"norm", "abs", "clamp_", "clamp", "square", "pow", "mean", "max", "std", "var", "median", "nan_to_num", "nan_to_num_"}  # fmt: skip
_MAY_UNSCALE = regex(r"scal|amp", re.IGNORECASE)
_OWN_STEP = regex(r"^(?!_*(save|load|restore|dump|store|build|make|create|get|init|setup|set|prepare|log|check)_).*scaler", re.IGNORECASE)  # fmt: skip
_OWN_CLIPS = {"clip_gradients", "clip_gradient", "clip_grads", "clip_grad", "clip_grad_value"}  # of other files
_OPTIMIZER = regex(r"(^|_)(opt|optim|opti|optimi[sz]er|adam|adamw|sgd)s?(_|$|\d)|optimi[sz]er|(?-i:_?optim[A-Z_]|[a-z]Opt$|^opt[A-Z_])", re.IGNORECASE)  # fmt: skip
_MODEL = regex(
    r"^(ddp_)?(model|net|network)(_(train|eval|ddp|dp|parallel|without_ddp))*$"
    r"|^(?!_*(save|load|build|get_|create|make|init|set|prepare|export|unwrap|wrap|compile|update|freeze|convert|train|evaluate|log|reset)"
    r").*_model$"
)
_FORWARD = regex(r"^(forward(_\w+)?|(get|compute|calc|calculate)_loss|training_losses|p_losses|(train|training|val|valid|validation|eval|test)_step|"
                 r"generate|predict(_(?!step$|proba$)\w+)?|encode(_(image|text))?|decode)$")  # fmt: skip
_LOSS = regex(r"loss\W*$", re.IGNORECASE)
_SCHEDULES = regex(r"schedule(?!_?free)", re.IGNORECASE)  # an AdamWScheduleFree is an optimizer
_SCHEDULER = regex(r"sched(?!ule_?free)|warmup|annealing|decay|one_?cycle|(^|_)sch(_|$|\d)", re.IGNORECASE)
_OWNERS = regex(r"accelerator|fabric|engine|strategy|deepspeed|trainer|precision|plugin|backend", re.IGNORECASE)
_OPTIM_CLASS = regex(  # not the averaged model of torch.optim.swa_utils
    r"^torch\.optim(?!\.swa_utils)|(Ada[mfgd]|AdaBelief|SGD|Lion|RMSprop|LAMB|Lamb|Ranger|Muon|Shampoo|(?i:schedule_?free|optim(?!al|um|ism|i[sz](?!er))))[^.]*$"
)


@dataclass(frozen=True)
class Action:
    """What a call does."""

    kind: str
    scaler: str = ""
    optimizer: str = ""
    subject: str = ""
    scaled: str = "no"


class Recogniser:
    """Interprets the calls of one script; caches what each variable is."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self._kinds: dict[tuple[str, Function], str] = {}
        # Variables on which unscale_ or scale(...).backward() is called behave like a GradScaler, however created.
        self._scalers_by_use = {
            _last(key_of(call.func.value))
            for name in ("unscale_", "scale")
            for call, _ in outline.calls.get(name, ())
            if isinstance(call.func, ast.Attribute) and (name == "unscale_" or self._feeds_backward(call))
            # An engine whose `scale` result is used for backward, such as DeepSpeed's, steps and unscales by itself.
            if not _OWNERS.search(_last(key_of(call.func.value)))
        } - {""}
        self._data_scalers = data_scalers(outline) - self._scalers_by_use
        self._models_by_use = models_by_use(outline)
        self._owners_of_models = owners_of_models(outline)
        # Objects with a `backward(loss)` of their own, such as the engine of DeepSpeed.
        self._engines = {
            _last(key_of(call.func.value))
            for call, _ in outline.calls.get("backward", ())
            if isinstance(call.func, ast.Attribute) and call.args
        } - {""}
        self._stepped = {
            _last(key_of(call.args[0])) for call, _ in outline.calls.get("step", ()) if len(call.args) == 1
        } - {""}

    def _feeds_backward(self, call: ast.Call) -> bool:
        parent = self.outline.parents.get(call)
        return isinstance(parent, ast.Attribute) and parent.attr == "backward"

    def kind_of(self, key: str, function: Function) -> str:
        """What a variable is: scaler, wrapper (like a scaler but not torch's), optimizer, scheduler, or ""."""
        if not key:
            return ""
        variable = (key, function)
        if variable not in self._kinds:
            self._kinds[variable] = ""  # while it is being determined: variables may be copies of each other
            self._kinds[variable] = self._find_kind(key, function)
        return self._kinds[variable]

    def _find_kind(self, key: str, function: Function) -> str:
        name = _last(key)
        kinds = set()
        for value in self.outline.values(key, function) or stored_in(self.outline, key):
            for option in options_of(value):
                if isinstance(option, ast.Constant) and option.value is None:
                    continue
                other = key_of(option)
                if option is not value and other and other != key:
                    kinds.add(self.kind_of(other, function))  # `scaler if amp else other`
                else:
                    kinds.add(self._created(option, function))
        if names_optimizer(self.outline, key, function):
            return "optimizer"
        if name in self._data_scalers and "scaler" not in kinds:
            return ""
        kinds.discard("")
        if kinds == {"factory"} and name in self._scalers_by_use and name not in self.outline.calls:
            return "scaler"
        kinds = {"wrapper" if kind == "factory" else kind for kind in kinds}
        for kind in ("scaler", "scheduler", "optimizer", "wrapper"):
            if kind in kinds and (kind != "wrapper" or name in self._scalers_by_use or "scaler" in name.lower()):
                return kind
        if kinds - {"unknown"}:
            return ""
        if name in self._scalers_by_use:
            return "wrapper" if kinds or name in self.outline.calls else "scaler"
        if _SCHEDULER.search(name):
            return "scheduler"
        if _OPTIMIZER.search(name) or _OPTIMIZER.search(name.partition("[")[0]):  # `opts["g"]`
            return "optimizer"
        if "scaler" in name.lower() and not kinds and name not in self.outline.calls:
            is_torch = self.outline.names.uses("torch") and not self.outline.names.uses("sklearn", "cuml")
            return "scaler" if is_torch else ""
        return ""

    def _created(self, value: ast.expr, function: Function) -> str:
        if not isinstance(value, ast.Call):
            return "" if key_of(value.value if isinstance(value, ast.Subscript) else value) else "other"
        if make_scaler(self.outline, value, function):
            return "scaler"
        name = called_name(self.outline, value.func)
        last = name.rsplit(".", 1)[-1]
        is_read = last in {"get", "pop", "getattr"} and any("scaler" in str(constant(a)) for a in value.args)
        if is_read or last == "step":
            return ""  # `kwargs.get("scaler")`: passed like a parameter; `optimizer = schedule.step(i, optimizer)`
        if last == "instantiate" and value.args:
            last = _last(key_of(value.args[0])) or last  # of Hydra: `instantiate(cfg.amp.scaler)`
        if "lr_scheduler" in name or _SCHEDULES.search(last) or last.endswith("LR") or sets_rate(self.outline, last):
            return "other" if schedules_value(value, name) else "scheduler"
        if _OPTIM_CLASS.search(f"{name}.{last}"):
            return "optimizer"
        if "scaler" in last.lower():
            if is_data_scaler(last):
                return "other"
            if returns_scaler(self.outline, last):
                return "scaler"
            # A function that returns a scaler (`build_scaler(cfg)`) or another GradScaler class; other classes differ.
            return "factory" if last.islower() or last.endswith("GradScaler") else "wrapper"
        return "unknown"

    def action_of(self, call: ast.Call, function: Function) -> Action | None:
        """What a call does, or None if it does nothing that matters to rules."""
        func = call.func
        name = self.outline.names.full(func)
        if isinstance(func, ast.Attribute):
            method = getattr(self, f"_on_{func.attr}", None)
            if method is not None:
                action: Action | None = method(call, func.value, function)
                if action is not None:
                    return action
            is_added = func.attr in {"add_", "sub_"} and any(map(adds_unscaled, arguments_of(call)))
            if (func.attr in _READS or is_added) and is_gradient(self.outline, func.value, function):
                return Action("grad_read", subject=func.attr)
        return self._by_full_name(call, name, function)

    def _by_full_name(self, call: ast.Call, name: str, function: Function) -> Action | None:
        last = name.rsplit(".", 1)[-1] if name else _last(key_of(call.func))
        if last in CLIPS and not (isinstance(call.func, ast.Attribute) and not name):
            return Action("clip", subject=last)
        # A function of another file that receives the model or its parameters, and not the scaler or the optimizer.
        keys = [key_of(value) for value in arguments_of(call)] if last in _OWN_CLIPS and call.args else ["amp"]
        if not any(_MAY_UNSCALE.search(key) or self.kind_of(key, function) for key in keys):
            return Action("clip", subject=last)
        if last == "zero_grad" and call.args and not isinstance(call.func, ast.Attribute):
            return Action("zero_grad", optimizer=key_of(call.args[0]))  # a function: `zero_grad(params)`
        if last == "float" and len(call.args) == 1 and key_of(tensor_of(call.args[0])):
            return Action("item", subject=key_of(tensor_of(call.args[0])))
        if name in BCE or (bce := bce_of(self.outline, call.func, function)):
            return Action("bce", subject=key_of(call.func), scaled="yes" if name in BCE else bce)
        if name in WRAPS:
            return Action(f"wrap_{WRAPS[name]}", subject=key_of(call.args[0]) if call.args else "")
        if name == "apex.amp.initialize":
            return Action("apex_initialize", subject=key_of(argument(call, 0, "models")))
        if name == "torch.autograd.grad":
            return Action("autograd_grad")
        if reads_gradients(self.outline, call, function, name, last):
            return Action("grad_read", subject=last)
        if make_scaler(self.outline, call, function):
            return Action("make_scaler")
        if name.startswith("torch.optim.") and "lr_scheduler" not in name and "swa_utils" not in name:
            return Action("make_optimizer", subject=models_in(self.outline, argument(call, 0, "params"), function))
        key = called_key(call.func)
        if key and len(call.args) >= 2 and _OWN_STEP.search(_last(key)) and self.kind_of(key, function) != "scaler":
            return Action("owned_step", scaler=key)
        is_model = self._is_model(key) or key in {"self", "self.forward"} or is_part(key)
        owner = key.rpartition(".")[0]
        if key and is_model and (call.args or call.keywords) and not name:
            return Action("forward", subject=key)
        if (run := run_by_call(self.outline, call, last)) and self._is_model(run):
            # With the scaler it may also run backward: `sequential_forward(model, x, scaler)`.
            return self._passed_scaler(call, function) or Action("forward", subject=run)
        runs = _FORWARD.search(_last(key)) or OWN_LOSS.search(_last(key))
        is_owner = self._is_model(owner) or _last(owner) in self._owners_of_models
        if owner and is_owner and runs and arguments_of(call) and not name:
            return Action("forward", subject=owner)
        return self._passed_scaler(call, function) or self._checkpoint(call, function)

    def _is_model(self, key: str) -> bool:
        return bool(_MODEL.search(_last(key))) or (_last(key) in self._models_by_use and not _LOSS.search(key))

    def _checkpoint(self, call: ast.Call, function: Function) -> Action | None:
        """A function of another file that saves or restores the objects it receives."""
        name = _last(key_of(call.func))
        verb = "save" if saves(name) else "load" if restores(name) else ""
        if not verb:
            return None
        passed = passed_objects(self.outline, call, function)
        return self._states(verb, [key for key in passed if not is_setting(key, self._stepped)], function)

    def _states(self, verb: str, keys: list[str], function: Function) -> Action | None:
        """The action on several objects: with a scaler among them, or with an optimizer and no scaler."""
        for kind in ("scaler", "wrapper", "optimizer"):
            key = next((key for key in keys if self.kind_of(key, function) == kind), "")
            if key:
                return Action(f"{verb}_{'optimizer' if kind == 'optimizer' else 'scaler'}", scaler=key, optimizer=key)
        return None

    def _passed_scaler(self, call: ast.Call, function: Function) -> Action | None:
        """A scaler passed to a function that is not in this file, which may do anything with it."""
        if key_of(call.func) in {"print", "isinstance", "str", "repr", "type", "hasattr", "getattr", "id"}:
            return None
        for key in (key_of(option) for passed in arguments_of(call) for option in options_of(passed)):
            named = key and (_last(key) in self._scalers_by_use or "scal" in key.lower())
            if named and self.kind_of(key, function) == "scaler":
                return Action("stored" if stores(call) else "handed", scaler=key)
        return None

    def _on_backward(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        if self.outline.names.full(call.func) == "torch.autograd.backward":
            scaler = next((s for a in call.args for s in self._scales_in(a, function)), "")
            return Action("backward", scaler=scaler, scaled="yes" if scaler else "no")
        key = key_of(receiver)
        own = "model" in key or "engine" in key
        if own and not call.args and _LOSS.search(key):
            own = False  # `model_out.loss`, `model_out["loss"]`: a tensor that a model returned
        if key == "self" or own or (isinstance(receiver, ast.Call) and key_of(receiver.func) == "super"):
            return Action("owned_backward", subject=key)
        if call.args and (not key or "loss" not in _last(key).lower() or _OWNERS.search(key) or "scaler" in key):
            return Action("owned_backward", subject=key)
        if any("scal" in key_of(a).lower() for a in arguments_of(call)):
            # A project's loss object, which scales with the scaler it is passed.
            return Action("owned_backward", subject=key)
        scales = self._scales_in(receiver, function)
        if scales:
            whole = isinstance(receiver, ast.Call) and self.kind_of(scales[0], function) == "scaler"
            return Action("backward", scaler=scales[0], subject=key, scaled="yes" if whole else "maybe")
        by_name = "maybe" if may_be_scaled(self.outline, receiver, function) else "no"
        return Action("backward", subject=key or first_key(receiver), scaled=by_name)

    def _scales_in(self, node: ast.AST, function: Function) -> list[str]:
        called = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
        keys = (key_of(f.value) for f in called if isinstance(f, ast.Attribute) and f.attr == "scale")
        return [key for key in keys if key and self.kind_of(key, function) in {"scaler", "wrapper"}]

    def scaler_in(self, node: ast.AST, function: Function) -> str:
        """The scaler that scales a value; "" if none does."""
        return next(iter(self._scales_in(node, function)), "")

    def scaled_by(self, node: ast.AST, function: Function) -> str:
        """Whether an assigned value carries a loss scale: yes, no or maybe."""
        if isinstance(node, ast.IfExp):
            either = {self.scaled_by(node.body, function), self.scaled_by(node.orelse, function)}
            return either.pop() if len(either) == 1 else "maybe"
        if self._scales_in(node, function):
            return "yes"
        return "maybe" if hand_scaled(node) else "no"

    def _on_manual_backward(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        return Action("owned_backward", subject=key_of(receiver))

    def _on_scale(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        key = key_of(receiver)
        if self.kind_of(key, function) == "scaler":
            return Action("scale", scaler=key, subject=key_of(argument(call, 0, "outputs")))
        return None

    def _on_unscale_(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        return Action("unscale", scaler=key_of(receiver), optimizer=key_of(argument(call, 0, "optimizer")))

    def _on_unscale_gradients(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        return Action("owned_unscale", subject=key_of(receiver))

    def _on_step(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        key = key_of(receiver)
        kind = self.kind_of(key, function)
        if kind == "scaler" and not call.args and not call.keywords:
            return None  # another object under a scaler's name: `[s.step() for s in schedulers]`
        if kind == "scaler":
            return Action("scaler_step", scaler=key, optimizer=key_of(argument(call, 0, "optimizer")))
        if kind == "wrapper":
            return Action("owned_step", scaler=key)
        if kind == "optimizer" or (_last(key) in self._stepped and kind != "scheduler"):
            # `optimizer.step(scaler=scaler)`: a project's optimizer, which steps with the scaler it is passed.
            return self._passed_scaler(call, function) or Action("opt_step", optimizer=key)
        looped = looped_objects(self.outline, call, key, function) if not kind and key.isidentifier() else []
        made = () if kind else looped_calls(self.outline, call, key, function)
        kinds = {kind, *(self.kind_of(k, function) for k in looped), *(self._created(v, function) for v in made)}
        is_schedule = "scheduler" in kinds
        if "optimizer" in kinds and not is_schedule:
            return Action("opt_step", optimizer=key)  # `for o in optimizers: o.step()`
        if not is_schedule and _last(key) in self._engines and not call.args:
            return Action("engine_step", subject=key)
        return Action("sched_step", subject=key) if is_schedule else None

    def _on_step_update(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        """The step of timm's schedulers, which receives the number of updates."""
        key = key_of(receiver)
        return Action("sched_step", subject=key) if self.kind_of(key, function) == "scheduler" else None

    def _on_second_step(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        """The step of sharpness-aware minimization, after `first_step`."""
        key = key_of(receiver)
        return Action("opt_step", optimizer=key) if self.kind_of(key, function) == "optimizer" else None

    def _on_update(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        key = key_of(receiver)
        return Action("update", scaler=key) if self.kind_of(key, function) in {"scaler", "wrapper"} else None

    def _on_zero_grad(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        return Action("zero_grad", optimizer=key_of(receiver))

    def _on_state_dict(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        return self._state("save", call, receiver, function)

    def _on_optim_state_dict(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        return Action(
            "save_optimizer", optimizer=key_of(argument(call, 1, "optim"))
        )  # `FSDP.optim_state_dict(model, optimizer)`

    def _on_load_state_dict(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        return self._state("load", call, receiver, function)

    def _state(self, verb: str, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        key = key_of(receiver)
        kind = self.kind_of(key, function)
        if kind not in {"scaler", "wrapper", "optimizer"} and key.isidentifier():
            return self._states(verb, looped_objects(self.outline, call, key, function), function)
        return self._states(verb, [key], function)

    def _on_half(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        name = getattr(call.func, "attr", "")
        dtype = {"half": "float16", "float": "float32"}.get(name, name)
        return Action("cast", subject=key_of(receiver), scaled=dtype) if not call.args else None

    _on_bfloat16 = _on_float = _on_half

    def _on_to(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        for value in (*call.args, *(k.value for k in call.keywords if k.arg == "dtype")):
            dtype = DTYPES.get(self.outline.names.full(value))
            if dtype:
                return Action("cast", subject=key_of(receiver), scaled=dtype)
        return None

    def _on_item(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        key = key_of(tensor_of(receiver))
        return Action("item", subject=key) if key else None

    def _on_get_scale(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        by_hand = scales_by_hand(self.outline, call, function)
        return Action("get_scale", scaler=key_of(receiver), scaled="maybe" if by_hand else "no")

    def _on_clip_grad_norm_(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        if self.outline.names.full(call.func):
            return None
        key = key_of(receiver)
        owned = _OWNERS.search(key) or key in {"self", ""} or self.kind_of(key, function) == "optimizer"
        return Action("owned_clip" if owned else "clip", subject=_last(key_of(call.func)))

    _on_clip_grad_value_ = _on_clip_grad_norm_

    def _on_clip_gradients(self, call: ast.Call, receiver: ast.expr, function: Function) -> Action | None:
        return None if self.outline.names.full(call.func) else Action("owned_clip")
