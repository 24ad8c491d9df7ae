"""Scalers that a test of the weights, or of FSDP, keeps from float16 weights, and plain scalers that it does not."""

import pytest

from check_scripts import reported
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

LOADED = """\
import argparse
import torch
from transformers import AutoModel

parser = argparse.ArgumentParser()
parser.add_argument("--train-dtype", choices=["float32", "float16"], default="float32")
args = parser.parse_args()

def train(args, loader):
    dtypes = {{"float32": torch.float32, "float16": torch.float16}}
    model = AutoModel.from_pretrained(args.name, torch_dtype=dtypes[args.train_dtype]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    weights_dtype = next(model.parameters()).dtype
    use_scaler = {test}
    scaler = torch.amp.GradScaler("cuda", enabled=use_scaler)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=use_scaler):
            loss = model(x).loss
        if use_scaler:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()

train(args, loader)
"""
SPARED = [
    "weights_dtype not in {torch.float16, torch.bfloat16}",
    "weights_dtype != torch.float16",
    "not (weights_dtype == torch.float16)",
    'args.device == "cuda" and weights_dtype == torch.float32',
    "model.dtype != torch.half",
]
NOT_SPARED = ['args.device == "cuda"', "weights_dtype != torch.bfloat16", "weights_dtype != torch.float32"]
SHARDED = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from transformers import AutoModel

def train(args, loader, world_size):
    dtype = torch.float16 if args.fp16 else torch.float32
    model = AutoModel.from_pretrained(args.name, torch_dtype={load})
    use_fsdp = world_size > 1
    model = FSDP(model) if use_fsdp else model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if dtype == torch.float16:
        if use_fsdp:
            scaler = ShardedGradScaler()
        else:
            scaler = {other}
    else:
        scaler = None
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).loss
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
BRANCH = """\
import torch

class Trainer:
    def __init__(self, model, optimizer, use_amp):
        self.model, self.optimizer, self.use_amp = model, optimizer, use_amp
        self.scaler = torch.amp.GradScaler("cuda", enabled=use_amp)

    def train_step(self, x, amp_dtype):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", {dtype}enabled=self.use_amp):
            loss = self.model(x)
        is_bf16 = {test}
        if self.use_amp and not is_bf16:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
"""
PLAIN = 'torch.amp.GradScaler("cuda")'


def _per_value(text: str) -> set[str]:
    """The codes of the findings for any value of the options."""
    document = read_document("train.py", text.encode(), "python")
    return {f.code for f in check_document(document, Settings(), Selection())}


@pytest.mark.parametrize("test", SPARED)
def test_weights_that_the_scaler_does_not_step(test):
    """The scaler raises for no weights, but nothing keeps the updates of the float16 ones either."""
    codes = _per_value(LOADED.format(test=test))
    assert "HS161" in codes
    assert "HS160" not in codes


@pytest.mark.parametrize("test", NOT_SPARED)
def test_weights_that_the_scaler_rejects(test):
    """A test of something else leaves the float16 weights to the scaler."""
    codes = _per_value(LOADED.format(test=test))
    assert "HS160" in codes
    assert "HS161" not in codes


def test_a_plain_scaler_next_to_a_sharded_one():
    """Without FSDP the plain scaler meets the float16 weights, which only FSDP's scaler accepts."""
    assert "HS160" in reported(SHARDED.format(load="dtype", other=PLAIN))
    assert "HS160" not in reported(SHARDED.format(load="dtype", other="ShardedGradScaler()"))
    assert "HS160" not in reported(SHARDED.format(load="torch.float32", other=PLAIN))


@pytest.mark.parametrize(
    "test", ["self.model.dtype == torch.bfloat16", "next(self.model.parameters()).dtype == torch.bfloat16"]
)
def test_bfloat16_weights_in_a_float16_region(test):
    """The dtype of the weights does not change that of the region, whose loss is then not scaled."""
    assert "HS123" in reported(BRANCH.format(test=test, dtype=""))
    assert "HS123" in reported(BRANCH.format(test=test, dtype="dtype=torch.float16, "))
    assert "HS123" not in reported(BRANCH.format(test=test, dtype="dtype=torch.bfloat16, "))


def test_one_dtype_for_the_region_and_the_scaler():
    """A flag that is about the dtype of the region may be right."""
    test = "amp_dtype == torch.bfloat16"
    assert "HS123" not in reported(BRANCH.format(test=test, dtype="dtype=amp_dtype, "))
    assert "HS123" not in reported(BRANCH.format(test=test, dtype=""))
