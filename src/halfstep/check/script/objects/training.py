"""Which 16-bit weights are trained: the optimizers and Trainers of a script, tied to the models they update.

An optimizer that keeps float32 master weights, or compensates for the rounding, is no finding; neither are frozen models,
adapters (whose own weights are float32) and quantized models. Where the text leaves any of that open, nothing is reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from halfstep.check.script.objects.adapters import adapter_use
from halfstep.check.script.objects.formats import SIXTEEN_BIT, keyword_of, may_be_none
from halfstep.check.script.objects.freezing import freezes, freezing_loops
from halfstep.check.script.objects.loading import initialized, loading_options
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import (
    ADAPTER_FLAG,
    Cast,
    Lineage,
    VariableCast,
    asks_for_adapters,
    casts_in,
    conditions_of,
    trace_model,
)
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["Trained", "Training"]

# Packages whose optimizers update the weights in the dtype the weights have.
_PLAIN = (
    "torch.optim.", "bitsandbytes.optim.", "transformers.AdamW", "transformers.Adafactor", "transformers.optimization.Ada",
    "apex.optimizers.", "torchao.optim.", "torchao.prototype.low_bit_optim.", "lion_pytorch.", "prodigyopt.", "dadaptation.",
    "schedulefree.", "galore_torch.", "torch_optimizer.", "timm.optim.", "came_pytorch.", "adabelief_pytorch.",
)  # fmt: skip
_KEEPS_MASTER = {"master_weights", "bf16_stochastic_round", "kahan_sum", "use_kahan_summation", "stochastic_rounding"}
_MASTERS = re.compile(
    r"master_?(weight|param|copy|copies|dtype|grad|fp32|model)|fp32_(master|param|copy|copies|weight|group|from)|"
    r"params?_(fp32|master)|FP16_?Optimizer|amp_C|kahan|stochastic_?round|^optimi$|AnyPrecision|from_fp16_groups|"
    r"cast_training_params|upcast_trainable",
    re.IGNORECASE,
)
# A function or method with such a name decides itself which weights are trained, or in which dtype.
_PREPARES = re.compile(
    r"freez|adapter|kbit|quant|trainable|upcast|fp32|float32|prompt_tun|requires_grad", re.IGNORECASE
)
_ASIDE = re.compile(
    r"eval|infer|test|sampl|generat|export|deploy|save(?!d)|onnx|valid|serve|predict|bench|profil|lora|adapter|quant|debug"
)
_OWNS_TRAINING = ("deepspeed", "colossalai", "megatron", "fairscale", "horovod", "nemo")
_PLUGINS = {"DeepSpeedPlugin", "FullyShardedDataParallelPlugin"}  # of Accelerate, which then trains float32 copies
_GROUPS = re.compile(r"param|group|decay|layer", re.IGNORECASE)
_TRAINER_ARGUMENTS = re.compile(
    r"TrainingArguments$|(SFT|DPO|GRPO|ORPO|KTO|CPO|Reward|RLOO|OnlineDPO|GKD|BCO|PRM)Config$"
)
# Optimizers of TrainingArguments that compensate for 16-bit weights, or never store an update.
_TRAINER_OPTIMIZERS = re.compile(r"anyprecision|lomo|apollo|stable|kahan")

MAX_OPTIMIZERS = 50  # in one script; only generated code creates more


@dataclass(frozen=True, eq=False)
class Trained:
    """16-bit weights and the optimizer or Trainer that updates them."""

    cast: Cast
    by: ast.Call
    function: Function  # that contains `by`
    lineage: Lineage
    arguments: ast.Call | None = None  # of a Trainer: its TrainingArguments

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
        outline = self.outline
        if any(map(_MASTERS.search, (*outline.loads, *outline.bindings))) or outline.calls.keys() & _PLUGINS:
            return True
        return outline.names.uses(*_OWNS_TRAINING)

    @cached_property
    def by_optimizers(self) -> tuple[Trained, ...]:
        """16-bit weights that an optimizer without master weights updates."""
        if self.adapters == "yes" or self.has_masters:
            return ()
        return tuple(self._unique(self._optimizer_ties()))

    @cached_property
    def cast_parameters(self) -> tuple[Cast, ...]:
        """Casts of what is trained: `if p.requires_grad: p.data = p.data.to(torch.bfloat16)`, adapters included."""
        if self.has_masters or not self.optimizers:
            return ()
        casts = []
        for call, function, key, formats in self._casts:
            parent = self.outline.parents.get(call)
            target = key_of(parent.targets[0]) if isinstance(parent, ast.Assign) else ""
            tested = any(is_true and "requires_grad" in text for text, is_true in conditions_of(self.outline, call))
            is_training = not _ASIDE.search(function.name.lower()) or "train" in function.name.lower()
            is_parameter = target.endswith(".data") and key in {target, target[:-5]}
            if formats & SIXTEEN_BIT and is_parameter and tested and is_training:
                casts.append(Cast(call, function, target[:-5], formats, "cast"))
        return tuple(casts)

    @cached_property
    def by_trainers(self) -> tuple[Trained, ...]:
        """16-bit weights that a transformers or TRL Trainer updates."""
        if self.adapters == "yes" or not self.outline.calls.get("train"):
            return ()
        return tuple(self._unique(self._trainer_ties()))

    def _unique(self, ties: Iterator[Trained]) -> Iterator[Trained]:
        reported = set()
        for tie in ties:
            if tie.cast.node not in reported:
                reported.add(tie.cast.node)
                yield tie

    def _optimizer_ties(self) -> Iterator[Trained]:
        tied: set[ast.AST] = set()
        for call, function in self.optimizers[:MAX_OPTIMIZERS]:
            params = argument(call, 0, "params")
            for owner, scope in self.owners(params, function) if params is not None else ():
                lineage = self.model(owner, scope)
                if not self._is_spared(lineage):
                    for cast in lineage.casts:
                        if cast.node not in tied and self._reaches(cast, call, function, owner):
                            tied.add(cast.node)
                            yield Trained(cast, call, function, lineage)

    @cached_property
    def optimizers(self) -> tuple[tuple[ast.Call, Function], ...]:
        """The calls that create an optimizer without master weights."""
        outline = self.outline
        calls = [
            site
            for full, sites in outline.library_calls.items()
            if full.startswith(_PLAIN) and "lr_scheduler" not in full and ".swa_utils" not in full
            for site in sites
        ]
        # `optimizer_class = bnb.optim.AdamW8bit if ... else torch.optim.AdamW`
        for name, sites in outline.calls.items():
            if "optim" in name.lower() and name in outline.bindings:
                calls += [site for site in sites if self._is_plain_class(site.call.func, site.function)]
        return tuple(
            (call, function)
            for call, function in calls
            if not any(k.arg in _KEEPS_MASTER and constant(k.value) is not False for k in call.keywords)
        )

    def _is_plain_class(self, func: ast.expr, function: Function) -> bool:
        options = [func]
        key = key_of(func)
        if key:
            options = [part for v in self.outline.values(key, function) for part in _arms(v)]
        return bool(options) and all(self.outline.names.full(option).startswith(_PLAIN) for option in options)

    def owners(self, params: ast.expr, function: Function, depth: int = 4) -> Iterator[tuple[ast.expr, Function]]:
        """The models whose own parameters an expression contains, each with the function to look it up in."""
        outline = self.outline
        # Copies of the parameters, such as float32 masters, are other tensors.
        names = {n.attr for n in ast.walk(params) if isinstance(n, ast.Attribute)}
        if names & {"clone", "float", "float32", "detach", "master", "deepcopy"}:
            return
        stack: list[ast.AST] = [params]
        while stack:
            node = stack.pop()
            func = node.func if isinstance(node, ast.Call) else None
            if isinstance(func, ast.Attribute) and func.attr in {"parameters", "named_parameters"}:
                yield from self._instances(func.value, function)
                continue
            if isinstance(node, ast.Call) and _GROUPS.search(text_of(node.func)):
                target = outline.call_target(node, function)
                if target is None:  # a function of another file that sorts the parameters into groups
                    yield from ((arg, function) for arg in node.args if _is_model_name(key_of(arg)))
                elif depth:
                    for call, inner in self._parameter_calls(target):
                        yield from self._instances(call, inner)
            elif isinstance(node, ast.Name) and depth:
                for binding in outline.lookup(node.id, function):
                    if binding.value is not None and binding.function is function:
                        yield from self.owners(binding.value, function, depth - 1)
                for call, inner in self._appended(node.id, function):
                    yield from self._instances(call, inner)
            stack.extend(ast.iter_child_nodes(node))

    def _parameter_calls(self, target: Function) -> Iterator[tuple[ast.expr, Function]]:
        for name in ("parameters", "named_parameters"):
            for call, inner in self.outline.calls.get(name, ()):
                if inner is target and isinstance(call.func, ast.Attribute):
                    yield call.func.value, inner

    def _appended(self, name: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
        """The models of a loop `for n, p in model.named_parameters(): groups.append(p)`."""
        for call, inner in self.outline.calls.get("append", ()):
            if inner is function and isinstance(call.func, ast.Attribute) and key_of(call.func.value) == name:
                parent: ast.AST | None = call
                while parent is not None and not isinstance(parent, (ast.For, ast.FunctionDef)):
                    parent = self.outline.parents.get(parent)
                if isinstance(parent, ast.For):
                    for part in ast.walk(parent.iter):
                        if isinstance(part, ast.Attribute) and part.attr in {"parameters", "named_parameters"}:
                            yield part.value, function

    def _instances(self, owner: ast.expr, function: Function) -> Iterator[tuple[ast.expr, Function]]:
        """The variable itself; for `self`, the variables that instances of its class are assigned to."""
        key = key_of(owner)
        if key != "self":
            if key or isinstance(owner, ast.Call):
                yield owner, function
            return
        for call, scope in self.outline.calls.get(function.cls, ()):
            yield call, scope
            node: ast.AST = call
            while isinstance(node, (ast.expr, ast.keyword)):
                node = self.outline.parents[node]
            if isinstance(node, ast.Assign) and key_of(node.targets[0]):
                yield node.targets[0], scope

    def _is_spared(self, lineage: Lineage) -> bool:
        """Whether the model is frozen, adapted, quantized or cast back to float32 somewhere in this file."""
        if lineage.is_adapted or lineage.is_restored or not any(c.may_be_low for c in lineage.casts):
            return True
        outline = self.outline
        for name, sites in outline.calls.items():
            if not _PREPARES.search(name):
                continue
            for call, function in sites:
                owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
                if name == "requires_grad_" and constant(argument(call, 0, "requires_grad")) is True:
                    continue
                if self.adapters == "optional" and asks_for_adapters(conditions_of(outline, call)):
                    continue
                keys = [owner, *(key_of(a) for a in call.args), *(key_of(k.value) for k in call.keywords)]
                if "print" not in name and any(lineage.has(key, function) for key in keys):
                    return True
        return any(freezes(lineage, loop, function) for loop, function in self._freezing_loops)

    @cached_property
    def _freezing_loops(self) -> tuple[tuple[ast.For, Function], ...]:
        return freezing_loops(self.outline)

    def _reaches(self, cast: Cast, by: ast.Call, function: Function, owner: ast.expr) -> bool:
        """Whether the weights still have this cast's dtype when `by` trains them."""
        if not cast.may_be_low:
            return False
        outline = self.outline
        here = conditions_of(outline, cast.node)
        there = (*conditions_of(outline, by), *conditions_of(outline, owner))
        if any((text, not is_true) in there for text, is_true in here):
            return False
        if any(is_true and ADAPTER_FLAG.search(text) for text, is_true in here):
            return False  # the branch that attaches an adapter
        if any(is_true and _ASIDE.search(text.lower()) for text, is_true in here if (text, is_true) not in there):
            return False
        if any(_ASIDE.search(f.name.lower()) and "train" not in f.name.lower() for f in (cast.function, function)):
            return False
        if self._ends_run(cast, by):
            return False
        # A cast after the training loop is for saving or serving.
        last = self._last_backward.get(cast.function)
        return last is None or cast.node.lineno < last

    @cached_property
    def _last_backward(self) -> dict[Function, int]:
        """The last line with a `backward` in each function."""
        sites = self.outline.calls.get("backward", ())
        return {site.function: site.call.lineno for site in sorted(sites, key=lambda site: site.call.lineno)}

    def _ends_run(self, cast: Cast, by: ast.Call) -> bool:
        """Whether the branch that casts a model ends without training it: `if args.export: ...; return`."""
        parents = self.outline.parents
        node: ast.AST = cast.node
        while (parent := parents.get(node)) is not None and not isinstance(
            parent, (ast.FunctionDef, ast.AsyncFunctionDef)
        ):
            block = parent.body if isinstance(parent, ast.If) and node in parent.body else []
            if isinstance(parent, ast.If) and node in parent.orelse:
                block = parent.orelse
            last = block[-1] if block else None
            inside = any(by is inner for statement in block for inner in ast.walk(statement))
            if isinstance(last, (ast.Raise, ast.Continue, ast.Break)) and not inside:
                return True
            left = text_of(last.value.func) if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) else ""
            if left in {"exit", "quit", "sys.exit", "os._exit"} and not inside:
                return True
            if isinstance(last, ast.Return) and not inside and last is not node:
                returned = {key_of(n) for n in ast.walk(last)} if last.value is not None else set()
                if cast.key not in returned:
                    return True
            node = parent
        return False

    def _trainer_ties(self) -> Iterator[Trained]:
        for name, sites in self.outline.calls.items():
            if not name.endswith("Trainer"):
                continue
            for call, function in sites:
                model = argument(call, 0, "model") or initialized(call)
                arguments = self._arguments(call, function)
                if model is None or arguments is None or self._is_sharded(arguments, function):
                    continue
                own = keyword_of(self.outline, call, function, "optimizers", "peft_config", "optimizer_cls_and_kwargs")
                if own is not None and constant(own) is not None and not may_be_none(self.outline, own, function):
                    continue
                lineage = self.model(model, function)
                lineage.casts += loading_options(self.outline, model, arguments, function)
                if not self._is_spared(lineage):
                    for cast in lineage.casts:
                        if self._reaches(cast, call, function, model):
                            yield Trained(cast, call, function, lineage, arguments)

    def _arguments(self, trainer: ast.Call, function: Function) -> ast.Call | None:
        """The call that creates a Trainer's arguments, if there is one in this file."""
        node = argument(trainer, 1, "args")
        pending = [(node, function)]
        visited: set[str] = set()
        while pending:
            value, scope = pending.pop()
            key = key_of(value)
            if key and key not in visited:
                visited.add(key)
                pending += [(v, scope) for v in self.outline.values(key, scope)]
            elif isinstance(value, ast.Call):
                name = text_of(value.func).rsplit(".", 1)[-1]
                if _TRAINER_ARGUMENTS.search(name):
                    return value
                target = self.outline.call_target(value, scope)
                if target is not None:
                    returns = [n.value for n in ast.walk(target.node) if isinstance(n, ast.Return) and n.value]
                    pending += [(r, target) for r in returns]
        return None

    def _is_sharded(self, arguments: ast.Call, function: Function) -> bool:
        """Whether DeepSpeed or FSDP trains float32 copies, or the chosen optimizer compensates."""
        for name in ("deepspeed", "fsdp", "fsdp_config", "optim_target_modules"):
            value = keyword_of(self.outline, arguments, function, name)
            if value is not None and constant(value) not in {None, "", False} and not self._is_off_by_default(value):
                return True
        optim = constant(keyword_of(self.outline, arguments, function, "optim"))
        return isinstance(optim, str) and bool(_TRAINER_OPTIMIZERS.search(optim))

    def _is_off_by_default(self, value: ast.expr) -> bool:
        """Whether a value is a command-line option whose default is None."""
        if not isinstance(value, ast.Attribute):
            return False
        for call, _ in self.outline.calls.get("add_argument", ()):
            if any(str(constant(a)).lstrip("-").replace("-", "_") == value.attr for a in call.args):
                default = argument(call, None, "default")
                return default is None or constant(default) is None
        return False


def _arms(node: ast.expr) -> list[ast.expr]:
    return [*_arms(node.body), *_arms(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def _is_model_name(key: str) -> bool:
    return bool(re.search(r"model|net|unet|transformer|policy|actor|critic|backbone|encoder|decoder", key.lower()))
