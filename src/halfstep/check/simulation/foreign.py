"""What calls give in a simulated run: the script's own functions, torch's, and those of objects that another file created.

An object from elsewhere is taken for what its name says: something called `scaler` whose `step` gets an optimizer is a scaler.
Where such an object, or a loss, goes into code of another file, what that code does with it is not known.
"""

from __future__ import annotations

import ast
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.decisions import Decisions
from halfstep.check.simulation.values import (
    Instance,
    Optimizer,
    Params,
    Scaler,
    Tensor,
    Unknown,
    combined,
    has_tensor,
    is_plain,
    unknown,
)

__all__ = ["HARMLESS", "Foreign"]

_OPTIMIZER = regex(r"(^|_)(opt|optim|optimizer|optimiser)(s|_\w+|\d*)?$|^opt[A-Z]|[Oo]ptimi[sz]er")
_SCALER = regex(r"scaler")
_OF_OPTIMIZERS = {"step", "zero_grad"}
_FACTORY = regex(r"optim(?!\w*(group|param|config|step|args))")
# What is trained, by its name; `self.module` is a wrapper's, `modules` are anything.
_MODEL = regex(
    r"(^|[._])(\w*(model|network|net|encoder|decoder|generator|discriminator|critic|student|unet|vae|backbone|transformer))(_?\w{0,2})$|^(g|d|net_?[gd])$"
)
HARMLESS = regex(
    r"sched|config|signature|filter|(^|_)lr|save|load|log|state|checkpoint|ckpt|print|resume|ema|info|count|wandb|append|dict|adjust|warm|repr|format|len|size|param|monitor|restore"
)
_TRAINS = regex(
    r"backward|step|optimi|scaler|(?<!pre)train(?!ing_loss|able|ed)|(^|_)fit|grad|scale_loss|learn(?!able|ed)|(^|_)update(?!_?(loss|meter|metric|stat|block|plot|bar|hist|best|pbar|ema))"
)
_FREEZES = regex(r"requires?_grad|toggle_grad|freez")
# What hooks and methods of an unknown base class do by their names: not what only computes or moves something.
_COMPUTES = regex(
    r"^_?(forward|compute|get|is|has|should|prepare|move|to|transform|encode|decode|embed|predict|sample|generate|eval|valid|make|calc|calculate|preprocess|postprocess|collate|unpack)(_(?!.*(backward|step|optim|train|grad|update))|$)|(loss|criterion|transform|collate\w*|metrics?|forward_pass|to_device)$"
)
_STABLE = regex(
    r"^(get|getattr|is_\w+|has_\w+|getboolean|getint|get_\w+|parse_args|parse_known_args|pop|lower|upper|strip|startswith|endswith)$"
)


class Foreign(Decisions):
    """Calls what another file defines."""

    def call_unknown(self, key: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function of another file gives."""
        name = key.rpartition(".")[2]
        every = [*args, *kwargs.values()]
        self.hand_over(name, every)
        if _FREEZES.search(name):
            self._freeze(key, every)
        if any(isinstance(a, Scaler) for a in every):  # what it gives may use it
            return Unknown(self.path.fresh("object"))
        if any(self.models_in(a) for a in every) and self._creates_optimizer(key, node):
            return self.optimizer(name, every, node)
        if (optimizer := self.optimizer_from(name, every, node)) is not None:
            return optimizer
        if self.names_object(target := self.target_of(node)):
            return Unknown(target)
        if all(map(is_plain, every)) and _STABLE.search(name):
            return unknown(f"{key}({', '.join(map(repr, args))})")
        if has_tensor(every):
            return self.forward(key, every)
        made = Unknown(self.path.fresh(key))
        if name.isidentifier() and name[0].isupper() and not name.isupper():  # an object of a class, which is true
            self.path.settle(made.key, 0)
            self.path.settle(f"{made.key} is None", 1)
        elif not all(map(is_plain, every)):
            return self.forward(key, every)
        return made

    def forward(self, key: str, args: list[Any]) -> Tensor:
        """What a model, or a function that is not known, computes from its arguments."""
        if self.has_no_graph():
            return Tensor(frozenset())
        formats, region = self.format_here()
        tensors = combined(*args)
        models = None
        used = {key} | {a.key for a in args if isinstance(a, Unknown | Instance)}
        if tensors.models is not None:
            models = tensors.models | used
        halved = tensors.halved | (used if "float16" in formats else set())
        result = Tensor(
            models,
            formats | tensors.formats,
            tensors.scaler,
            tensors.version,
            (tensors.region if tensors.models else None) or region or tensors.region,
            halved,
        )
        self.gradients.computed = combined(self.gradients.computed, result)
        return result

    def hand_over(self, name: str, values: list[Any]) -> None:
        """Code of another file gets these values."""
        if HARMLESS.search(name.lower()) and "backward" not in name:
            return
        for value in values:
            if isinstance(value, Optimizer):
                self.gradients.lose(optimizer=value)
            elif isinstance(value, Scaler):
                self.gradients.lose(scaler=value)
            elif (isinstance(value, Unknown) and (self.is_scaler(value) or self.is_optimizer(value))) or (
                isinstance(value, Instance)
                and value.cls.lookup("forward") is ...
                and any(isinstance(v, Optimizer | Scaler) for v in value.attributes.values())
            ):
                self.gradients.lose()
        losses = (v for v in values if isinstance(v, Tensor) and v.models != frozenset())
        if not name.startswith("on_") and _TRAINS.search(name.lower()) and any(losses):
            self.gradients.lose()

    def may_train(self, name: str) -> bool:
        """Whether a hook, or a method of an unknown base class, may run a backward pass or a step."""
        return not HARMLESS.search(name.lower()) and (not _COMPUTES.search(name) or "train" in name)

    def _freeze(self, key: str, values: list[Any]) -> None:
        """`set_requires_grad(models, False)`, or `model.freeze()`: of which parameters is not known."""
        owner, _, name = key.rpartition(".")
        parts = [p for v in values for p in (v if isinstance(v, list | tuple) else [v])]
        models = frozenset(p.key for p in parts if isinstance(p, Unknown | Instance))
        models = models.union(*(p.models for p in parts if isinstance(p, Params)))
        flags = [v for v in values if isinstance(v, bool)]
        is_all = len(flags) == 1 and "freez" not in name
        self.gradients.frozen.set(
            models or (frozenset({owner}) if owner else None), flags[0] if is_all else False, is_all=is_all
        )

    def _creates_optimizer(self, key: str, node: ast.AST) -> bool:
        """Whether a function of another file that gets parameters gives an optimizer, by its name or that of its result."""
        name, target = key.rpartition(".")[2], self.target_of(node)
        if "ema" in name.lower():
            return False
        return name[:1].isupper() or "opt" in key.lower() or bool(target and self.is_optimizer(Unknown(target)))

    def optimizer_from(self, name: str, values: list[Any], node: ast.AST) -> Optimizer | None:
        """The optimizer that a function of another file creates from a model, or wraps; None if it does neither."""
        wrapped = [v for v in values if isinstance(v, Optimizer)]
        if wrapped:
            target = self.target_of(node)
            return wrapped[0] if len(wrapped) == 1 and target and self.is_optimizer(Unknown(target)) else None
        models = self._models_passed(values, node) if _FACTORY.search(name) else None
        if not models:
            return None
        made = self.made_optimizer(name, models, node)
        made.is_of_all = False
        return made

    def _models_passed(self, values: list[Any], node: ast.AST) -> frozenset[str]:
        """The models among what a function gets, by their names."""
        nodes = [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
        models = set()
        for value, argument in zip(values, nodes, strict=False):
            text = ast.unparse(argument)
            key = value.key if isinstance(value, Unknown | Instance) else text
            is_model = any(_MODEL.search(name.lower()) for name in (text, key.partition("#")[0].partition("@")[0]))
            if isinstance(value, Unknown | Instance | Tensor) and is_model:
                models.add(key)
        return frozenset(models)

    def optimizer(self, name: str, args: list[Any], node: ast.AST) -> Optimizer:
        """A new optimizer over what is passed first."""
        return self.made_optimizer(name, self.models_in(args[0]) if args else None, node)

    def made_optimizer(self, name: str, models: frozenset[str] | None, node: ast.AST) -> Optimizer:
        """A new optimizer of these models."""
        made = Optimizer(self.target_of(node) or name, models, node, tuple(self.sites))
        made.created = len(self.gradients.backwards)
        if self.target_of(node):  # the one of the fold before is gone
            old = [o for o in self.gradients.optimizers if o.node is node and o.sites == made.sites]
            self.gradients.optimizers[:] = [o for o in self.gradients.optimizers if o not in old]
        self.gradients.optimizers.append(made)
        return made

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

    def names_object(self, target: str) -> bool:
        """Whether a variable is named like a scaler or an optimizer."""
        return bool(target) and (self.is_scaler(Unknown(target)) or self.is_optimizer(Unknown(target)))

    def is_scaler(self, value: Unknown) -> bool:
        """Whether something that another file created is named like a scaler."""
        return bool(_SCALER.search(value.key.rpartition(".")[2].lower()))

    def is_optimizer(self, value: Unknown) -> bool:
        """Whether something that another file created is named like an optimizer."""
        last = value.key.rpartition(".")[2]
        return bool(_OPTIMIZER.search(last)) and "sched" not in last

    def as_object(self, value: Any, method: str = "step") -> Any:
        """The scaler or optimizer that an unknown value is by its name, if that has this method."""
        if not isinstance(value, Unknown):
            return value
        if value.key not in self.objects:
            if method not in _OF_OPTIMIZERS and not self.is_scaler(value):
                return value
            if self.is_scaler(value):
                made: Any = Scaler(value.key, True, None)
                self.gradients.scalers.append(made)
            elif self.is_optimizer(value):
                owner = value.key.rpartition(".")[0]
                is_of_model = bool(_MODEL.search(owner.lower()))
                made = Optimizer(value.key, frozenset({owner}) if is_of_model else None)
                self.gradients.optimizers.append(made)
            else:
                return value
            self.objects[value.key] = made
        return self.objects[value.key]

    def as_optimizer(self, value: Any, name: str) -> Any:
        """What a scaler steps is an optimizer, whatever its name; in the text it has this one."""
        if isinstance(value, Instance):
            value = Unknown(value.key)
        if isinstance(value, Tensor):  # what another file's function gave
            value = Unknown(name)
        if isinstance(value, Unknown) and not isinstance(self.as_object(value), Optimizer):
            self.objects[value.key] = Optimizer(value.key, None)
            self.gradients.optimizers.append(self.objects[value.key])
        return self.as_object(value)
