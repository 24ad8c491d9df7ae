"""HS614: flags that are assigned where the arguments are created, in another function than the Trainer, or through the Trainer."""

import pytest

from check_scripts import reported

HEAD = "import torch\nfrom transformers import Trainer, TrainingArguments\n"
BUILT = """
def build(cfg):
    targs = TrainingArguments(cfg.out, fp16=cfg.half)
    if cfg.newer:
        {late}
    return targs

def main(cfg):
    args = build(cfg)
    Trainer(model=model, args=args, train_dataset=data).train()

main(parse())
"""
METHOD = """
class Run:
    def make_args(self):
        a = TrainingArguments("out")
        a.fp16 = True
        return a

    def run(self):
        Trainer(model=self.model, args=self.make_args(), train_dataset=self.data).train()

Run().run()
"""
OF_TRAINER = """
args = TrainingArguments("out", bf16=True)
trainer = Trainer(model=model, args=args, train_dataset=data)
{late}
trainer.train()
"""


@pytest.mark.parametrize(
    "text",
    [
        BUILT.format(late="targs.fp16, targs.bf16 = False, True"),
        BUILT.format(late="targs.bf16 = True"),
        METHOD,
        OF_TRAINER.format(late="trainer.args.fp16 = True"),
    ],
    ids=["pair", "function", "method", "trainer"],
)
def test_a_flag_that_comes_too_late(text):
    """The precision has been chosen when the arguments were created."""
    assert reported(HEAD + text) == {"HS614"}


@pytest.mark.parametrize(
    "text",
    [
        BUILT.format(late="targs.logging_steps = 5"),
        BUILT.format(late="targs = TrainingArguments(cfg.out, bf16=True)"),
        BUILT.replace("    targs", "    cfg.fp16, cfg.bf16 = False, True\n    targs", 1).format(late="pass"),
        OF_TRAINER.format(late="trainer.args.fp16_full_eval = True"),
    ],
    ids=["other", "created again", "before", "evaluation"],
)
def test_what_is_not_late(text):
    """Other flags, new arguments, and flags of the object that the arguments are created from."""
    assert reported(HEAD + text) == set()
