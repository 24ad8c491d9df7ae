"""HS196 in Lightning modules: the Trainer advances a schedule with interval "step" in each iteration."""

import pytest

from check_scripts import checked

MODULE = """\
import torch
import lightning.pytorch as pl
{before}
class Base(pl.LightningModule):
    def training_step(self, batch, index):
        return self.model(batch).loss
    {override}

class Module(Base):
    def __init__(self, model):
        super().__init__()
        self.model = model
        {manual}
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = {schedule}
        {returned}

def main(args, loader):
    trainer = pl.Trainer(max_epochs=3, precision={precision}, accelerator="gpu")
    trainer.fit(Module(make_model(args)), loader)
"""
STEP = 'return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}'


def reported(**parts):
    """The lines of HS196."""
    defaults = {
        "before": "", "override": "", "manual": "", "schedule": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 1000)",
        "returned": STEP, "precision": '"16-mixed"',
    }  # fmt: skip
    return checked(MODULE.format(**defaults | parts), "HS196")


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"precision": "16"},
        {"precision": '"16-mixed" if torch.cuda.is_available() else 32'},
        {"returned": 'return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]'},
        {"returned": 'return [optimizer], [dict(scheduler=schedule, interval="step")]'},
        {"returned": 'entry = {"scheduler": schedule}; entry["interval"] = "step"; return [optimizer], [entry]'},
        {"schedule": "transformers.get_cosine_schedule_with_warmup(optimizer, 100, 1000)"},
    ],
)
def test_a_schedule_per_step(parts):
    """However the entry is written, where every Trainer of the file scales the loss."""
    assert reported(**parts) == [17]


@pytest.mark.parametrize(
    "parts",
    [
        {"precision": '"bf16-mixed"'},
        {"precision": '"16-true"'},
        {"precision": "args.precision"},
        {"returned": STEP.replace("step", "epoch")},
        {"returned": "return [optimizer], [schedule]"},
        {"manual": "self.automatic_optimization = False"},
        {"schedule": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)"},
        {"override": "def lr_scheduler_step(self, scheduler, metric): self.advance(scheduler)"},
        {"before": "from lightning.pytorch.strategies import DeepSpeedStrategy"},
    ],
)
def test_schedules_that_skip_nothing_or_wait(parts):
    """Without a loss scale, per epoch, with a metric, by hand, and where the module decides itself."""
    assert reported(**parts) == []


def test_an_option_that_offers_float16():
    """A run with that value skips steps."""
    text = 'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--precision", choices={})\nargs = parser.parse_args()'
    offers = [["16-mixed", "bf16-mixed"], ["32-true", "bf16-mixed"]]
    assert [len(reported(before=text.format(o), precision="args.precision")) for o in offers] == [1, 0]


def test_the_default_of_an_option():
    """A run without options scales the loss, whether or not the option names its choices."""
    text = 'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--precision", default={})\nargs = parser.parse_args()'
    defaults = (16, '"16-mixed"', 32, '"bf16-mixed"')
    assert [len(reported(before=text.format(d), precision="args.precision")) for d in defaults] == [1, 1, 0, 0]
