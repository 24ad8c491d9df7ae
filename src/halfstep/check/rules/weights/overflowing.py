"""HS270: a model that overflows in float16 is trained in float16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.config.overflowing import OVERFLOWING
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.flow.order import is_amp
from halfstep.check.script.flow.run_format import OLDER, flag_states, without_bf16
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import keyword_of
from halfstep.check.script.objects.values import Autocast, argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.trained.defaults import by_default, keyword_by_default, text_by_default

__all__ = ["RULES"]

_TRAINER = """\
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

model = AutoModelForSeq2SeqLM.from_pretrained("{model}")
args = Seq2SeqTrainingArguments("out", {flag}=True)
Seq2SeqTrainer(model=model, args=args, train_dataset=data).train()
"""
_LIGHTNING = """\
import lightning as L
from transformers import T5ForConditionalGeneration

class Tuner(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = T5ForConditionalGeneration.from_pretrained("google/flan-t5-large")

L.Trainer(precision="{precision}").fit(Tuner(), loader)
"""
_NOT_MODELS = ("Tokenizer", "Processor", "Config", "FeatureExtractor", "TokenizerFast")
_ON_GPU = regex(r"^torch\.cuda\.is_available\(\)$|^([\w.]*\.)?((use|has|on|is|with)_)?(gpu|cuda)(_available)?$")
_OFF_GPU = regex(r"^([\w.]*\.)?(((use|on|is|force)_)?cpu(_only)?|(no|without|disable)_?(gpu|cuda))$")
_HALF: frozenset[object] = frozenset({16, "16", "16-mixed", "16-true"})
# The argument of an engine that names a precision, and its values for float16.
_ENGINES: dict[tuple[str, str], tuple[str, frozenset[object]]] = {
    ("accelerate", "Accelerator"): ("mixed_precision", frozenset({"fp16"})),
    **{
        (package, last): ("precision", _HALF)
        for package in ("lightning", "pytorch_lightning")
        for last in ("Trainer", "Fabric")
    },
}


class OverflowingModel(ScriptRule):
    """A model whose activations exceed the range of float16 is trained in float16."""

    code = "HS270"
    name = "overflowing-model"
    severity = "warning"
    reason = (
        "T5 v1.1, FLAN-T5, mT5, T0 and the large T5 checkpoints, and Gemma 3 with models derived from it (MedGemma), were pre-trained in bfloat16 and have activations above 65504, "
        "the largest float16 number (a report on a Gemma 3 model has 800,000). In float16 they become inf: the loss is NaN, or 0 in the Trainer's log. "
        "Loss scaling does not help, because the forward pass overflows. Use bfloat16, or float32 on GPUs without it."
    )
    bad = (
        _TRAINER.format(model="google/flan-t5-base", flag="fp16"),
        _LIGHTNING.format(precision="16-mixed"),
        _TRAINER.format(model="google/mt5-small", flag="fp16").replace("True", "torch.cuda.is_available()"),
    )
    good = (
        _TRAINER.format(model="google/flan-t5-base", flag="bf16"),
        _LIGHTNING.format(precision="bf16-mixed"),
        _TRAINER.format(model="t5-small", flag="fp16"),
    )
    references = (
        "https://github.com/huggingface/transformers/issues/23918",
        "https://github.com/huggingface/transformers/issues/14189",
        "https://github.com/huggingface/trl/issues/3236",
        "https://github.com/unslothai/unsloth/pull/4014",
    )
    lines = (
        "flan-t5",
        "mt5-",
        "t5-v1",
        "t5-large",
        "t5-3b",
        "t5-11b",
        "gemma-3",
        "embeddinggemma",
        "mt0-",
        "medgemma",
        "translategemma",
        "functiongemma",
        "t5gemma-2",
        "fp16=True",
        "fp16=torch",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """fp16 that is on in every run, or on every GPU, where all models of the file are known to overflow."""
        if is_exercise(script) or script.outline.names.uses("unsloth"):
            return  # Unsloth trains these models in float32 itself
        loads = _model_loads(script)
        names = {name for _, texts in loads for name in texts}
        if not names:
            return
        model = " and ".join(f"`{name}`" for name in sorted(names))
        for node, how, is_certain in _half_modes(script):
            yield self.finding(
                script.where(node),
                f"{'' if is_certain else 'on a GPU without bfloat16 '}{model} has activations above 65504, which {how} turns into inf: the loss becomes NaN",
                instead="train in bfloat16, or in float32 on a GPU without it",
                severity=None if is_certain else "advice",
            )
        region = _region_of_training(script, loads[0][0]) if len(loads) == 1 else None
        if region is not None:
            flags = [
                text for text, is_true in conditions_of(script.outline, region.node) if is_true and is_amp((text, True))
            ]
            flags += [region.enabled] if region.enabled != "yes" else []
            yield self.finding(
                script.where(loads[0][0]),
                f"{f'with `{flags[0]}`, ' if flags else ''}{model} has activations above 65504, which float16 autocast ({script.at(region.node)}) turns "
                "into inf: the loss becomes NaN",
                instead="dtype=torch.bfloat16 for autocast, or float32 on a GPU without it",
            )


def _model_loads(script: Script) -> list[tuple[ast.Call, set[str]]]:
    """The loads of models with their checkpoints, if the text names all of them and each overflows."""
    loads: list[tuple[ast.Call, set[str]]] = []
    for call, function in script.outline.calls.get("from_pretrained", ()):
        loader = text_of(call.func).removesuffix(".from_pretrained").rpartition(".")[2]
        if loader.endswith(_NOT_MODELS) or not loader[:1].isupper() or loader.startswith("Peft"):
            continue
        texts = _texts(script, argument(call, 0, "pretrained_model_name_or_path"), function)
        if not texts or not all(OVERFLOWING.search(text) for text in texts):
            return []
        loads.append((call, texts))
    return loads


def _region_of_training(script: Script, load: ast.Call) -> Autocast | None:
    """The float16 region in which a loop of the file runs a loaded model with gradients; None if any region may be bfloat16."""
    statement = script.statement(load)
    names = {key_of(t).rpartition(".")[2] for t in statement.targets} if isinstance(statement, ast.Assign) else set()
    forwards = [e for e in script.events("forward") if e.autocast() and not e.inside("no_grad")]
    own = [e for e in forwards if e.subject.removesuffix(".module").rpartition(".")[2] in names - {""}]
    regions = [a for e in own if (region := e.autocast()) is not None for a in region.autocasts]
    is_half = all(a.dtypes == {"float16"} and a.device in {"cuda", None} for a in (*regions, *script.autocasts))
    return regions[0] if regions and is_half and script.has("backward") else None


def _texts(script: Script, node: ast.expr | None, function: Function) -> set[str]:
    """The strings that an argument may be; empty if it may be something else."""
    if node is None:
        return set()
    key = key_of(node)
    values = [text_by_default(script.outline, v, function) for v in (script.outline.values(key, function) or [node])]
    return {v for v in values if isinstance(v, str)} if all(isinstance(v, str) for v in values) else set()


def _half_modes(script: Script) -> Iterator[tuple[ast.expr, str, bool]]:
    """The arguments that make a Trainer or an Accelerator compute in float16, and whether they do on every GPU."""
    outline = script.outline
    for full, sites in outline.library_calls.items():
        package, last = full.split(".")[0], full.rpartition(".")[2]
        for site in sites:
            if package in {"transformers", "trl"} and last.endswith(("TrainingArguments", "Config")):
                node = keyword_by_default(outline, site.call, site.function, "fp16")
                if node is not None and _is_on(script, node, site.function):
                    yield node, "fp16", True
                elif node is not None and flag_states(outline, node, site.function) == {OLDER}:
                    yield node, "fp16", False
            else:
                name, modes = _ENGINES.get((package, last), ("", frozenset()))
                node = keyword_of(outline, site.call, site.function, name) if name else None
                if node is None:
                    continue
                if (mode := by_default(outline, node, site.function)) in modes:
                    yield node, f"{name} {mode!r}", True
                elif (mode := constant(without_bf16(outline, node, site.function))) in modes:
                    yield node, f"{name} {mode!r}", False


def _is_on(script: Script, node: ast.expr, function: Function) -> bool:
    """Whether a flag is true, true on every GPU, or true unless an option turns it off."""
    if by_default(script.outline, node, function) is True:
        return True
    values = script.outline.values(key_of(node), function) if key_of(node) else []
    return all(constant(value) is True or _asks_for_gpu(value) for value in values or [node])


def _asks_for_gpu(value: ast.expr) -> bool:
    """Whether a flag is true on a GPU and false without one: `torch.cuda.is_available()`, `not args.cpu`, `False if no_gpu else True`."""
    if isinstance(value, ast.IfExp) and {constant(value.body), constant(value.orelse)} == {True, False}:
        is_true, value = constant(value.body) is True, value.test
    else:
        is_true = True
    while isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
        is_true, value = not is_true, value.operand
    text = text_of(value)
    return is_true if _ON_GPU.search(text) else not is_true and bool(_OFF_GPU.search(text))


RULES: tuple[type[Rule], ...] = (OverflowingModel,)
