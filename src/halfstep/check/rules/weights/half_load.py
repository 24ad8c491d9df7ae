"""HS166: float16 weights that a Trainer with fp16=True rejects."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.masters import TRAINER, dtype_values, remedy, subject, when
from halfstep.check.script.objects.formats import formats_of, keyword_of
from halfstep.check.script.objects.training import Trained
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]


class HalfLoadWithFp16Training(ScriptRule):
    """A model with float16 weights is trained by a Trainer with fp16=True."""

    code = "HS166"
    name = "half-load-with-fp16-training"
    severity = "error"
    reason = (
        "`fp16=True` means float32 weights with float16 autocast and a scaler. With float16 weights the first step raises "
        "ValueError: Attempting to unscale FP16 gradients. Transformers 5 loads the checkpoint's own dtype unless `dtype` names another."
    )
    bad = (
        TRAINER.format(name="gpt2", dtype=", dtype=torch.float16", flags=", fp16=True"),
        TRAINER.format(name="gpt2", dtype=", torch_dtype=torch.float16", flags=", fp16=True"),
        TRAINER.format(name="gpt2", dtype=").half(", flags=", fp16=True"),
        TRAINER.format(
            name="gpt2", dtype=", torch_dtype=torch.float16 if opt.fp16 else torch.float32", flags=", fp16=opt.fp16"
        ),
        TRAINER.format(name="gpt2", dtype=", torch_dtype=torch.float16", flags=", fp16=torch.cuda.is_available()"),
    )
    good = (
        TRAINER.format(name="gpt2", dtype=", dtype=torch.float32", flags=", fp16=True"),
        "import torch\nfrom peft import LoraConfig, get_peft_model\n"
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.float16)\n"
        "model = get_peft_model(model, LoraConfig())\nargs = TrainingArguments('out', fp16=True)\nTrainer(model, args).train()\n",
    )
    references = (
        "https://github.com/huggingface/transformers/issues/23165",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/945",
        "https://huggingface.co/docs/peft/developer_guides/troubleshooting",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """float16 weights that are passed to a Trainer with fp16=True."""
        for tie in script.training.by_trainers:
            scaled = _scaled_when(script, tie)
            if scaled is not None:
                yield self.finding(
                    script.where(tie.cast.node),
                    f"{scaled}{subject(tie.cast)} has float16 weights and is trained with fp16=True: the scaler raises ValueError: Attempting to "
                    "unscale FP16 gradients",
                    instead=f"{remedy(script, tie.cast)}; fp16=True runs the computation in float16",
                )


def _scaled_when(script: Script, tie: Trained) -> str | None:
    """When float16 weights meet fp16=True, as the beginning of a message; None if the text does not show that they do."""
    assert tie.arguments is not None
    flag = keyword_of(script.outline, tie.arguments, tie.function, "fp16")
    if flag is None or "float16" not in tie.cast.low:
        return None
    options = script.outline.values(key_of(flag), tie.function) if key_of(flag) else []
    value = options[0] if len(options) == 1 else flag
    if tie.cast.formats == {"float16"}:
        if constant(value) is True:
            return when(script, tie.cast)
        if text_of(value) == "torch.cuda.is_available()":
            return when(script, tie.cast) or "on a GPU, "
    # `float16 if args.fp16 else float32` next to fp16=args.fp16: one flag decides both.
    for dtype in dtype_values(tie.cast):
        choices = script.outline.values(key_of(dtype), tie.cast.function) if key_of(dtype) else [dtype]
        for choice in choices:
            if not isinstance(choice, ast.IfExp) or text_of(choice.test) not in {text_of(value), text_of(flag)}:
                continue
            if formats_of(script.outline, choice.body, tie.cast.function) == {"float16"}:
                return f"when `{text_of(choice.test)}`, "
    return None


RULES: tuple[type[Rule], ...] = (HalfLoadWithFp16Training,)
