"""HS127 and HS186: plain scalers of a loop in another file, those that a branch prefers to the sharded one, and norms of shards."""

import pytest

from check_scripts import findings

RETURNED = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
def build(dtype):
    scaler = torch.amp.GradScaler("cuda", enabled=(dtype == torch.float16))
    return {returned}
def wrap(model):
    return FSDP(model)
"""
BRANCHES = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
def wrap(model, args):
    if args.engine == "fsdp":
        model = FSDP(model)
    return model
def build(args):
    scaler = None
    if {first}:
        scaler = torch.amp.GradScaler("cuda")
    elif args.engine == "fsdp":
        scaler = ShardedGradScaler()
    return scaler
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        pytest.param(RETURNED.format(returned="scaler"), [4], id="returned"),
        pytest.param(RETURNED.format(returned="dtype"), [], id="not used"),
        pytest.param(BRANCHES.format(first="args.use_amp"), [11], id="plain scaler first"),
        pytest.param(BRANCHES.format(first="args.engine == 'ddp'"), [], id="plain scaler for another engine"),
    ],
)
def test_the_scaler_of_a_sharded_model_is_judged_where_it_is_created(text, lines):
    """The loop may be in another file; a branch that may run with FSDP must create the sharded scaler."""
    assert [f.line for f in findings(text, "HS127")] == lines


FACTORIES = """\
import torch
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
class Wrapper:
    def wrap(self, model):
        return FSDP(model, {options})
    {wrapper}
class Precision:
    def make_scaler(self):
        return {scaler}
"""


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, [10]),
        ({"scaler": "GradScaler('cuda', enabled=self.cfg.fp16)"}, [10]),
        ({"scaler": "GradScaler('cuda') if self.cfg.fp16 else None"}, [10]),
        ({"scaler": "GradScaler('cuda', enabled=False)"}, []),
        ({"options": "sharding_strategy=ShardingStrategy.NO_SHARD"}, []),
        ({"wrapper": "def make_scaler(self): return None"}, []),  # each kind of strategy has its own
    ],
)
def test_a_scaler_that_a_method_of_another_class_returns(changes, lines):
    """The file has the wrapping and the scaler; the loop that combines them is elsewhere."""
    parts = {"options": "device_id=0", "wrapper": "name = 'fsdp'", "scaler": "GradScaler('cuda')", **changes}
    assert [f.line for f in findings(FACTORIES.format(**parts), "HS127")] == lines


CLIPPED = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel as DDP
class Trainer:
    def __init__(self, model, cfg):
        self.cfg = cfg
        {wrap}
        self.optimizer = torch.optim.AdamW(self.model.parameters())
    def fit(self, loader):
        for x in loader:
            self.step(x)
    def step(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(x).mean()
        loss.backward()
        {clip}
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("wrap", "clip", "is_reported"),
    [
        ("self.model = FSDP(model)", CLIP, True),
        ("self.model = FSDP(model.cuda(), auto_wrap_policy=policy)", "norm = " + CLIP, True),
        ("if cfg.fsdp: self.model = FSDP(model)\\n        else: self.model = DDP(model)", CLIP, True),
        ("self.model = FSDP(model)", "self.model.clip_grad_norm_(1.0)", False),
        ("self.model = FSDP(model, sharding_strategy=ShardingStrategy.NO_SHARD)", CLIP, False),
        ("self.model = DDP(model)", CLIP, False),
        ("self.model = model\n        self.other = FSDP(model)", CLIP, False),
        (
            "self.model = FSDP(model) if cfg.fsdp else model",
            f"if isinstance(self.model, FSDP): self.model.clip_grad_norm_(1.0)\n        else: {CLIP}",
            False,
        ),
        (
            "if cfg.fsdp: self.model = FSDP(model)\n        else: self.model = DDP(model)",
            f"if not self.cfg.fsdp: {CLIP}",
            False,
        ),
        ("self.model = FSDP(model)", "torch.nn.utils.clip_grad_value_(self.model.parameters(), 1.0)", False),
    ],
)
def test_the_norm_of_a_shard(wrap, clip, is_reported):
    """HS186 knows an attribute that another method has wrapped with FSDP."""
    text = CLIPPED.format(wrap=wrap.replace("\\n", "\n"), clip=clip)
    assert [f.line for f in findings(text, "HS186")] == [16 + wrap.count("\n") + wrap.count("\\n")] * is_reported
