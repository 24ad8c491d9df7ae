"""HS614: precision flags that are assigned to the arguments of a Trainer after their creation."""

import pytest

from check_scripts import findings

HEAD = """\
import torch, dataclasses
from transformers import {names}
from trl import SFTConfig, SFTTrainer
def main(cfg):
    model = build(cfg)
"""
CREATED = "    args = TrainingArguments('out'{flags})\n"
PARSED = "    parser = HfArgumentParser((ModelArguments, TrainingArguments))\n    model_args, args = parser.parse_args_into_dataclasses()\n"
END = "    trainer = {trainer}(model=model, args=args, train_dataset=data)\n    trainer.train()\n"
NAMES = "HfArgumentParser, Trainer, TrainingArguments"


def reported(body, trainer="Trainer"):
    """The lines at which HS614 is reported, counted from the creation of the arguments."""
    return [f.line - 5 for f in findings(HEAD.format(names=NAMES) + body + END.format(trainer=trainer), "HS614")]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (CREATED.format(flags="") + "    args.fp16 = True\n", 2),
        (CREATED.format(flags="") + "    if cfg.half:\n        args.fp16 = True\n", 3),
        (CREATED.format(flags=", bf16=cfg.bf16") + "    args.bf16 = False\n", 2),
        (CREATED.format(flags=", fp16=True") + "    args.fp16, x = False, 1\n    args.fp16 = False\n", 2),
        (
            CREATED.format(flags="")
            + "    args.bf16 = torch.cuda.is_bf16_supported()\n    args.fp16 = not args.bf16\n",
            2,
        ),
        (PARSED + "    args.fp16 = not args.bf16\n", 3),
        (PARSED + "    args.bf16 = True\n", 3),
        (CREATED.replace("TrainingArguments", "SFTConfig").format(flags="") + "    args.fp16 = True\n", 2),
    ],
)
def test_a_flag_that_is_set_after_the_arguments_were_created(body, line):
    """The creation chooses the precision, and the assignment changes it no more."""
    assert reported(body) == [line]


@pytest.mark.parametrize(
    ("body", "trainer"),
    [
        (CREATED.format(flags=", fp16=True") + "    args.fp16 = True\n", "Trainer"),
        (CREATED.format(flags=", bf16=cfg.bf16") + "    args.bf16 = cfg.bf16\n", "Trainer"),
        (CREATED.format(flags="") + "    args.fp16 = False\n", "Trainer"),
        (CREATED.format(flags=", fp16=cfg.fp16") + "    if device == 'cpu':\n        args.fp16 = False\n", "Trainer"),
        (CREATED.format(flags=", **options") + "    args.fp16 = True\n", "Trainer"),
        (CREATED.format(flags="") + "    args.fp16 = True\n    args.__post_init__()\n", "Trainer"),
        (CREATED.format(flags="") + "    args.fp16 = True\n    args = dataclasses.replace(args)\n", "Trainer"),
        (CREATED.format(flags="") + "    args.fp16 = True\n    args.mixed_precision = 'fp16'\n", "Trainer"),
        (CREATED.format(flags="") + "    args.fp16 = True\n", "SFTTrainer"),  # creates an SFTConfig of it
        (CREATED.format(flags="").replace("TrainingArguments", "SFTConfig") + "    args.bf16 = True\n", "SFTTrainer"),
        (CREATED.format(flags="") + "    other.fp16 = True\n", "Trainer"),
        ("    cfg.fp16 = True\n" + CREATED.format(flags=", fp16=cfg.fp16"), "Trainer"),
    ],
)
def test_flags_that_the_trainer_still_sees(body, trainer):
    """The same value as at the creation, arguments that are created again, and flags of other objects."""
    assert reported(body, trainer) == []


def test_unsloth_sets_the_precision_itself():
    """Its Trainers read the flags of the arguments."""
    text = "from unsloth import FastLanguageModel\n" + HEAD.format(names=NAMES) + CREATED.format(flags="")
    assert findings(text + "    args.fp16 = True\n" + END.format(trainer="Trainer"), "HS614") == []
