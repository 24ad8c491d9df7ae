"""HS110: gradients that a Trainer's callback logs because the environment says so."""

import json

import pytest

from check_scripts import findings
from halfstep.check.session import check_path

TRAINER = """\
import os
import wandb
from transformers import Trainer, TrainingArguments{imported}
{setting}
args = TrainingArguments("out", {precision}{report})
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
"""
SET = 'os.environ["WANDB_WATCH"] = "all"'


@pytest.mark.parametrize(
    ("setting", "precision", "report", "imported", "is_reported"),
    [
        (SET, "fp16=True", "", "", True),
        ('os.environ.setdefault("WANDB_WATCH", "gradients")', "fp16=True", ', report_to="wandb"', "", True),
        ('os.environ.update({"WANDB_WATCH": "all"})', "fp16=True", ', report_to=["wandb"]', "", True),
        ('os.environ.update(WANDB_WATCH="all")', "fp16=True", "", "", True),
        (
            f"{SET}\nclass Logs(WandbCallback): pass",
            "fp16=True",
            ', report_to="none"',
            "\nfrom transformers.integrations import WandbCallback",
            True,
        ),
        (SET, "fp16=True", ', report_to="none"', "", False),
        (SET, "bf16=True", "", "", False),
        ('os.environ["WANDB_WATCH"] = "parameters"', "fp16=True", "", "", False),
        ('os.environ["WANDB_WATCH"] = "false"', "fp16=True", "", "", False),
    ],
)
def test_watching_by_the_environment(setting, precision, report, imported, is_reported):
    """WANDB_WATCH=all or gradients with fp16=True logs scaled gradients, if the Trainer reports to W&B."""
    text = TRAINER.replace("{imported}", imported).replace("{setting}", setting)
    text = text.replace("{precision}", precision).replace("{report}", report)
    assert bool(findings(text, "HS110")) is is_reported


@pytest.mark.parametrize(
    ("magic", "is_reported"),
    [("%env WANDB_WATCH=all", True), ("%set_env WANDB_WATCH=gradients", True), ("%env WANDB_WATCH=false", False)],
)
def test_watching_by_a_magic(tmp_path, magic, is_reported):
    """A magic of a notebook sets the variable as well."""
    text = TRAINER.replace("{imported}", "").replace("{setting}", magic).replace("{precision}", "fp16=True")
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": text.replace("{report}", "")}]
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert any(f.code == "HS110" for f in check_path(str(path))) is is_reported


LOGGERS = """\
import torch
import wandb
import lightning as L
from accelerate import Accelerator
from lightning.pytorch.loggers import CSVLogger, WandbLogger
class Net(L.LightningModule):
    def on_fit_start(self):
        {inside}
    def training_step(self, batch, index):
        return self.net(batch)
logger = {logger}
{watch}
L.Trainer(precision="16-mixed", logger=logger).fit(Net(), loader)
"""


@pytest.mark.parametrize(
    ("logger", "watch", "inside", "expected"),
    [
        ("WandbLogger() if rank == 0 else CSVLogger('logs')", "logger.watch(model)", "pass", [12]),
        ("WandbLogger()", "logger.experiment.watch(model, log='gradients')", "pass", [12]),
        ("WandbLogger()", "pass", "self.logger.watch(self, log='all')", [8]),
        ("WandbLogger()", "pass", "self.trainer.logger.experiment.watch(self)", [8]),
        ("None", "accelerator.get_tracker('wandb', unwrap=True).watch(model)", "pass", [12]),
        ("None", "tracker = accelerator.get_tracker('wandb'); tracker.watch(model)", "pass", [12]),
        ("WandbLogger()", "logger.watch(model, 'parameters')", "pass", []),
        ("WandbLogger()", "logger.experiment.watch(model, log=None)", "pass", []),
        ("CSVLogger('logs')", "pass", "self.logger.watch(self)", []),
        ("WandbLogger()", "observer = Observer(); observer.watch(model)", "pass", []),
        ("None", "accelerator.get_tracker('mlflow').watch(model)", "pass", []),
    ],
)
def test_the_object_that_watches(logger, watch, inside, expected):
    """A logger among others, the run of one, that of the Trainer in a module, and the tracker of an Accelerator."""
    text = LOGGERS.format(logger=logger, watch=watch, inside=inside)
    assert [f.line for f in findings(text, "HS110")] == expected
