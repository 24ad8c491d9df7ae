"""Which 16-bit weights are trained: the optimizers and Trainers of a script, tied to the models they update.

An optimizer that keeps float32 master weights, or compensates for the rounding, is no finding; neither are frozen models,
adapters (whose own weights are float32) and quantized models. Where the text leaves any of that open, nothing is reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.objects.adapters import (
    Attachment,
    adapted_casts,
    adapter_use,
    is_attached_elsewhere,
    saved_layers,
)  # fmt: skip
from halfstep.check.script.objects.chosen import is_low_with_adapters
from halfstep.check.script.objects.expressions import (
    ADAPTER_FLAG,
    OTHER_USE,
    asks_for_adapters,
    ends_run,
    has_other_option,
    is_adapter_branch,
    is_aside,
    is_below_calls,
    is_quantized_branch,
    may_be_none,
)
from halfstep.check.script.objects.formats import SIXTEEN_BIT, keyword_of
from halfstep.check.script.objects.freezing import (
    freezes,
    freezing_loops,
    keeps_low,
    leaves_trained,
    may_be_frozen,
    trains_lifted_part,
    trains_part_of,
)
from halfstep.check.script.objects.layers import (
    MAKES_OPTIMIZER,
    added_adapters,
    cast_layers,
    created_adapters,
    defined_optimizers,
    enabled_with_adapters,
    is_created_low,
    is_of_trained,
    model_of_every_parameter,
    optimizer_factories,
    plain_optimizers,
)
from halfstep.check.script.objects.loading import is_rebound, lasting_casts, loading_options
from halfstep.check.script.objects.parameters import is_listed, is_model_name, may_freeze, mentions_masters, owners_of
from halfstep.check.script.objects.trainers import (
    PARSES,
    arguments_of,
    has_plain_trainer,
    has_plugin,
    is_sharded,
    is_trainer,
    model_of,
    unsharded_when,
)
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Cast, Lineage, VariableCast, casts_in, conditions_of, trace_model
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of
from halfstep.check.script.trained.enabling import SWITCHES, enabled_parts, is_switched_on
from halfstep.check.script.trained.lowered_modules import lowered_parts

__all__ = ["Trained", "Training"]

# A function or method with such a name decides itself which weights are trained, or in which dtype.
_PREPARES = regex(r"freez|adapter|kbit|quant|trainable|upcast|fp32|float32|prompt_tun|requires_grad", re.IGNORECASE)
_READS = regex(
    r"print|loss|^_*(get|list|count|filter|num|find)_\w*(param|weight)|^_*trainable_(param|weight)", re.IGNORECASE
)  # changes nothing
_ASIDE = regex(rf"{OTHER_USE.pattern}|lora|adapter|quant")
_OWNS_TRAINING = frozenset({"deepspeed", "colossalai", "megatron", "fairscale", "horovod", "nemo"})
_LOADS_DATA = "megatron.energon"  # Megatron's data loader, which any loop may use
MAX_OPTIMIZERS = 50  # in one script; only generated code creates more


@dataclass(frozen=True, eq=False)
class Trained:
    """16-bit weights and the optimizer or Trainer that updates them."""

    cast: Cast
    by: ast.Call
    function: Function  # that contains `by`
    lineage: Lineage
    arguments: ast.Call | None = None  # of a Trainer: its TrainingArguments
    is_assumed: bool = False  # a function of another file creates the optimizer: most keep no master weights

    @property
    def is_parsed(self) -> bool:
        """Whether the command line sets the arguments of a Trainer, perhaps with DeepSpeed or FSDP."""
        return self.arguments is not None and bool(PARSES.search(text_of(self.arguments.func)))

    @property
    def is_trainer(self) -> bool:
        """Whether a Trainer creates the optimizer."""
        return self.arguments is not None


class Training:
    """The models of a script and what trains them."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline

    def model(self, node: ast.expr, function: Function) -> Lineage:
        """The lineage of a model."""
        return trace_model(self.outline, node, function, self._casts)

    @cached_property
    def _casts(self) -> tuple[VariableCast, ...]:
        return tuple(casts_in(self.outline))

    @cached_property
    def adapters(self) -> str:
        """Whether the script trains adapters or quantizes models: no, optional or yes."""
        return adapter_use(self.outline)

    @cached_property
    def has_masters(self) -> bool:
        """Whether the script mentions float32 master weights, or an engine that keeps them."""
        return mentions_masters(self.outline) or has_plugin(self.outline) or bool(self._engines)

    @cached_property
    def _engines(self) -> frozenset[str]:
        """The packages of the script whose engines may keep master weights."""
        names = (n for n in self.outline.names.table.values() if not n.startswith(_LOADS_DATA))
        return frozenset(name.partition(".")[0] for name in names) & _OWNS_TRAINING

    def _is_without_engine(self, tie: Trained) -> bool:
        """Whether weights are cast or an optimizer is created only where no engine of DeepSpeed is: `if not use_deepspeed:`."""
        engines = [
            conditions_of(self.outline, s.call) for s in self.outline.library_calls.get("deepspeed.initialize", ())
        ]
        own = [conditions_of(self.outline, n) for n in (tie.cast.node, tie.by)]
        return bool(engines) and all(any(not possible(engine, guards) for guards in own) for engine in engines)

    @cached_property
    def by_optimizers(self) -> tuple[Trained, ...]:
        """16-bit weights that an optimizer without master weights updates."""
        idle = not self._updaters and not self._factories  # most files, and the cheapest to ask
        if idle or self._engines - {"deepspeed"} or mentions_masters(self.outline) or has_plugin(self.outline):
            return ()
        ties = self._adapted_ties() if self.adapters != "no" else iter(())
        ties = self._unique(chain(ties, self._optimizer_ties(in_full=self.adapters == "yes")))
        return tuple(tie for tie in ties if not self._engines or self._is_without_engine(tie))

    @cached_property
    def cast_parameters(self) -> tuple[Cast, ...]:
        """Casts of what is trained: `if p.requires_grad: p.data = p.data.to(torch.bfloat16)`, adapters included."""
        is_trained = self._updaters or self._factories or has_plain_trainer(self.outline)
        if not is_trained or self.has_masters:
            return ()
        casts = [
            c for c, model in cast_layers(self.outline, self._casts) if self._is_trained_in_full(model, c.function)
        ]
        for call, function, key, formats in self._casts:
            parent = self.outline.parents.get(call)
            target = key_of(parent.targets[0]) if isinstance(parent, ast.Assign) else ""
            model = model_of_every_parameter(self.outline, call) if self.adapters == "no" else ""
            tested = is_of_trained(self.outline, call) or (bool(model) and not _ASIDE.search(model.lower()))
            is_training = not _ASIDE.search(function.name.lower()) or "train" in function.name.lower()
            is_parameter = target.endswith(".data") and key in {target, target[:-5]}
            if formats & SIXTEEN_BIT and is_parameter and tested and is_training:
                casts.append(Cast(call, function, target[:-5], formats, "cast"))
        return tuple(casts)

    def _is_trained_in_full(self, key: str, function: Function) -> bool:
        """Whether nothing in the file freezes a model or attaches adapters, and an optimizer gets its parameters."""
        if may_freeze(self.outline) or self.adapters != "no":
            return False
        calls = [site for name in ("parameters", "named_parameters") for site in self.outline.calls.get(name, ())]
        owners = [(c.func.value, f) for c, f in calls if isinstance(c.func, ast.Attribute)]
        return any(self.model(owner, scope).has(key, function) for owner, scope in owners)

    @cached_property
    def by_trainers(self) -> tuple[Trained, ...]:
        """16-bit weights that a transformers or TRL Trainer updates."""
        names = {self.outline.names.table.get(name, name).rsplit(".", 1)[-1] for name in self.outline.calls}
        runs = names & {"train", "PPOTrainer"}  # TRL's first PPOTrainer has only `step`
        return tuple(self._unique(self._trainer_ties())) if runs else ()

    def _unique(self, ties: Iterator[Trained]) -> Iterator[Trained]:
        reported = set()
        for tie in ties:
            if (place := (tie.cast.node, tie.cast.dtype)) not in reported:
                reported.add(place)
                yield tie

    def _optimizer_ties(self, *, in_full: bool) -> Iterator[Trained]:
        """The ties of optimizers; with adapters only of models that have none, or all of whose parameters a loop enables."""
        tied: set[tuple[ast.AST, ast.expr | None]] = set()
        assumed = () if self._updaters else self._factories
        for call, function in (*self._updaters, *assumed)[:MAX_OPTIMIZERS]:
            for owner, scope in self.owners(call, function):
                lineage = self.model(owner, scope)
                is_whole = not in_full or any(lineage.has(key, f) for key, f in self._enabled_parts)
                is_whole = is_whole or is_attached_elsewhere(self.outline, lineage, call) or is_created_low(lineage)
                if is_whole and not self._is_spared(lineage, lists_trained=is_listed(self.outline, owner)):
                    for cast in lasting_casts(lineage):
                        place = (cast.node, cast.dtype)
                        if place in tied or (scope is cast.function and is_rebound(lineage, cast, owner)):
                            continue
                        if self._reaches(cast, call, function, owner):
                            tied.add(place)
                            yield Trained(cast, call, function, lineage, is_assumed=bool(assumed))

    @cached_property
    def _low_adapters(self) -> tuple[Cast, ...]:
        casts = (*adapted_casts(self.outline, self._casts), *added_adapters(self.outline, self.model))
        return tuple(c for c in casts if not any(map(is_quantized_branch, conditions_of(self.outline, c.node))))

    def _adapted_ties(self) -> Iterator[Trained]:
        """Adapters that are cast with their model, `get_peft_model(model, config).half()`, and their optimizer."""
        casts = self._low_adapters
        created = [*created_adapters(self.outline, self._casts)]
        for call, function in self._updaters[:MAX_OPTIMIZERS] if casts or created or self._saved_layers else ():
            for owner, scope in self.owners(call, function):
                yield from (Trained(cast, call, function, Lineage(self.outline, is_adapted=True)) for cast in created)
                yield from self._saved_ties(call, function, owner)
                lineage = self.model(owner, scope)
                for cast in casts:
                    is_same = lineage.has(cast.key, cast.function) or any(c.node is cast.node for c in lineage.casts)
                    reaches = is_same and self._reaches(cast, call, function, owner, is_adapted=True)
                    if reaches and not lineage.is_restored:
                        yield Trained(cast, call, function, replace(lineage, is_adapted=True))

    def _saved_ties(
        self, call: ast.Call, function: Function, model: ast.expr, arguments: ast.Call | None = None
    ) -> Iterator[Trained]:
        """Layers that are trained whole next to an adapter, `modules_to_save=["lm_head"]`, and what trains them."""
        for attached, text in self._saved_layers:
            lineage, base = self.model(model, function), self.model(attached.base, attached.function)
            if attached.call is call or any(lineage.has(key, attached.function) for key in attached.targets):
                is_lifted = any("float" in ast.unparse(loop) for loop, _ in self._freezing_loops)
                for cast in () if is_lifted or base.is_adapted or base.is_restored else lasting_casts(base):
                    if cast.low and self._reaches(cast, call, function, model, is_adapted=True):
                        yield Trained(replace(cast, key=text), call, function, base, arguments)

    @cached_property
    def _saved_layers(self) -> tuple[tuple[Attachment, str], ...]:
        return tuple(saved_layers(self.outline)) if self.adapters == "yes" else ()

    def owners(self, call: ast.Call, function: Function) -> Iterator[tuple[ast.expr, Function]]:
        """The models that the call which creates an optimizer receives."""
        if not MAKES_OPTIMIZER.search(last_name_of(call.func)):
            params = argument(call, 0, "params")
            yield from owners_of(self.outline, params, function) if params is not None else ()
            return
        receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []  # `model.configure_optimizers(lr)`
        for value in (*receiver, *call.args, *(k.value for k in call.keywords)):
            if key_of(value):
                is_model = is_model_name(key_of(value))
                yield from [(value, function)] if is_model else owners_of(self.outline, value, function)
            else:
                yield from owners_of(self.outline, value, function)

    @cached_property
    def _factories(self) -> tuple[tuple[ast.Call, Function], ...]:
        return optimizer_factories(self.outline)

    @cached_property
    def _updaters(self) -> tuple[tuple[ast.Call, Function], ...]:
        """The optimizers without master weights, those of classes of this file included."""
        return (*self.optimizers, *defined_optimizers(self.outline))

    @cached_property
    def optimizers(self) -> tuple[tuple[ast.Call, Function], ...]:
        """The calls that create an optimizer without master weights."""
        return plain_optimizers(self.outline)

    def _is_spared(self, lineage: Lineage, *, lists_trained: bool = False) -> bool:
        """Whether this file adapts, quantizes or casts the model back to float32, or freezes it, unless it lists what is trained."""
        is_kept = lineage.is_adapted or lineage.is_restored or not any(c.may_be_low for c in lineage.casts)
        if is_kept or may_be_frozen(lineage) or trains_lifted_part(lineage):
            return True
        outline = self.outline
        is_switched = is_switched_on(lineage, self._enabled_parts)
        for name, sites in outline.calls.items():
            is_excused = (is_switched and SWITCHES.search(name)) or (lists_trained and "freez" in name)
            if not _PREPARES.search(name) or is_excused:
                continue
            for call, function in sites:
                owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
                if name == "requires_grad_" and leaves_trained(lineage, call, function, self._enabled_parts):
                    continue
                is_asked = self.adapters == "optional" and self._is_asked_for(call, function)
                keys = [owner, *map(key_of, call.args), *(key_of(k.value) for k in call.keywords)]
                is_read = _READS.search(name) or isinstance(outline.parents.get(call), (ast.For, ast.comprehension))
                if is_asked or is_read or not any(lineage.has(key, function) for key in keys):
                    continue
                target = outline.call_target(call, function)
                if (target is None or not keeps_low(lineage, target)) and not lineage.is_frozen_by_option(call):
                    return True
        if is_switched or trains_part_of(lineage, self._enabled_parts):
            return False
        loops = [loop for loop, function in self._freezing_loops if freezes(lineage, loop, function)]
        return not all(self._is_of_adapters(loop) or lineage.is_frozen_by_option(loop) for loop in loops)

    def _is_asked_for(self, call: ast.Call, function: Function) -> bool:
        """Whether an option decides on adapters: around a call, or around every call of the function that attaches them."""
        sites = self.outline.calls.get(function.name, ()) if ADAPTER_FLAG.search(function.name) else ()
        around = [conditions_of(self.outline, site.call) for site in sites]
        return asks_for_adapters(conditions_of(self.outline, call)) or (
            bool(around) and all(map(asks_for_adapters, around))
        )

    def _is_of_adapters(self, loop: ast.For) -> bool:
        """Whether a loop freezes a model only where an option attaches adapters to it."""
        return self.adapters == "optional" and any(map(is_adapter_branch, conditions_of(self.outline, loop)))

    @cached_property
    def _enabled_parts(self) -> tuple[tuple[str, Function], ...]:
        return enabled_parts(self.outline)

    @cached_property
    def _freezing_loops(self) -> tuple[tuple[ast.For, Function], ...]:
        return freezing_loops(self.outline)

    def _reaches(
        self, cast: Cast, by: ast.Call, function: Function, owner: ast.expr, *, is_adapted: bool = False
    ) -> bool:
        """Whether the weights still have this cast's dtype when `by` trains them, or with `is_adapted` what is saved of them."""
        if not cast.may_be_low:
            return False
        outline = self.outline
        here = conditions_of(outline, cast.node)
        here += conditions_of(outline, cast.dtype) if cast.dtype is not None else ()
        there = (*conditions_of(outline, by), *conditions_of(outline, owner))
        if any((text, not is_true) in there for text, is_true in here):
            return False
        if not is_adapted and (any(map(is_adapter_branch, here)) or is_low_with_adapters(outline, cast)):
            return False  # the branch that attaches an adapter
        aside = OTHER_USE if is_adapted else _ASIDE
        own = [text for text, is_true in here if is_true and (text, is_true) not in there]
        if any(aside.search(text.lower()) and not has_other_option(text) for text in own):
            return False
        if any(is_aside(outline, f, aside, is_whole=cast.function is function) for f in (cast.function, function)):
            return False
        if ends_run(outline, cast.node, by, cast.key):
            return False
        is_other = cast.function is function and cast.node.lineno > by.lineno
        if cast.form != "cast" and (is_other or is_below_calls(outline, cast.node, cast.function, function)):
            return False  # another model than the one that is trained, or one that is loaded later, to evaluate it
        # A cast after the training loop is for saving or serving.
        return cast.node.lineno < self._last_backward.get(cast.function, cast.node.lineno + 1)

    @cached_property
    def _last_backward(self) -> dict[Function, int]:
        """The last line with a `backward` in each function."""
        sites = self.outline.calls.get("backward", ())
        return {site.function: site.call.lineno for site in sorted(sites, key=lambda site: site.call.lineno)}

    def _trainer_ties(self) -> Iterator[Trained]:
        for name, sites in self.outline.calls.items():
            for call, function in sites if is_trainer(self.outline, name) else ():
                model = model_of(self.outline, call, function)
                arguments = arguments_of(self.outline, call, function)
                if model is None or arguments is None or is_sharded(self.outline, arguments, function):
                    continue
                without = unsharded_when(self.outline, arguments, function)
                yield from self._saved_ties(call, function, model, arguments)
                own = keyword_of(
                    self.outline, call, function, "optimizers", "optimizer", "peft_config", "optimizer_cls_and_kwargs"
                )
                is_optional = own is not None and (
                    may_be_none(self.outline, own, function) or asks_for_adapters(conditions_of(self.outline, own))
                )
                if own is not None and constant(own) is not None and not is_optional:
                    continue
                lineage = self.model(model, function)
                for cast in lowered_parts(lineage, self._casts):
                    if self._reaches(cast, call, function, model, is_adapted=True):
                        yield Trained(cast, call, function, Lineage(self.outline, is_adapted=True), arguments)
                lineage.casts += loading_options(self.outline, model, arguments, function)
                casts = lineage.casts
                is_adapted = self.adapters == "yes" and not is_attached_elsewhere(self.outline, lineage, call)
                if is_adapted:
                    casts = [c for c in self._low_adapters if lineage.has(c.key, c.function)]
                    casts += enabled_with_adapters(lineage, self._enabled_parts)
                if casts and (is_adapted or not self._is_spared(lineage)):
                    for cast in casts:
                        only = not without or without in conditions_of(self.outline, cast.node)
                        if only and self._reaches(cast, call, function, model):
                            yield Trained(cast, call, function, lineage, arguments)
