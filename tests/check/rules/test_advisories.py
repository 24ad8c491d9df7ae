"""Advisories are reported for the versions, the GPU and the features that have them, and only then."""

import ast

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.pins import Pin
from halfstep.check.runner import check_document
from halfstep.check.script.objects.features import features_of_script
from halfstep.check.select import Selection
from halfstep.check.session import check_path
from halfstep.check.settings import Settings
from halfstep.hardware.advisory_table import ADVISORIES
from halfstep.hardware.advisory_words import FEATURE_WORDS, FEATURES
from halfstep.hardware.devices import find_devices

MASKED = "import torch.nn.functional as F\n\ndef attend(q, k, v, m):\n    return F.scaled_dot_product_attention(q, k, v, m)\n"
NO_GRAD = """\
import torch

def step(model, x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with torch.no_grad():
            target = model(y)
        return (model(x) - target).square().mean()
"""
MODULATED = """\
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.table = nn.Parameter(torch.zeros(1, 6, dim))

    def forward(self, x, t):
        shift, scale = (self.table + t).chunk(2, dim=1)
        return self.norm(x) * (1 + scale) + shift

model = torch.compile(Block(8))
"""
FUSED = """\
import torch

optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""
CALLS = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformer_engine.pytorch as te
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from bitsandbytes.optim import PagedAdamW8bit
from diffusers import ContextParallelConfig
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from transformers import AutoModelForCausalLM

max_seq_len = 131072
model = AutoModelForCausalLM.from_pretrained("x").half()
model.generate(**inputs)
mask = nn.Transformer.generate_square_subsequent_mask(9)
conv, norm, group = nn.Conv2d(1, 1, 1), nn.RMSNorm(4), nn.GroupNorm(1, 1)
device = torch.device("mps")
plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(mixed_precision="fp16", fsdp_plugin=plugin)
pipe.transformer.set_attention_backend("_native_cudnn")
pipe.transformer.enable_parallelism(config=ContextParallelConfig(ring_degree=2))
loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
attention = te.DotProductAttention(8, 256)
optimizer = PagedAdamW8bit(model.parameters())
sharded = ShardedGradScaler()
with torch.autocast("cuda", dtype=torch.bfloat16):
    F.scaled_dot_product_attention(q, k, v)
"""


def codes(text, *versions, gpu=None, path="train.py"):
    """The advisories found in a text, by id, with the versions as NAME=VERSION."""
    pins = tuple(Pin(*version.split("="), "--with") for version in versions)
    settings = Settings(gpu=find_devices(gpu)[0] if gpu else None, gpu_origin=f"--gpu {gpu}", pins=pins)
    language = {"py": "python", "json": "json", "yaml": "yaml"}[path.rpartition(".")[2]]
    findings = check_document(read_document(path, text.encode(), language), settings, Selection())
    return [f.message.partition("(HSA")[2][:4] for f in findings if f.code.startswith("HS4")]


@pytest.mark.parametrize(
    ("text", "versions", "gpu", "expected"),
    [
        (MASKED, ("torch=2.11",), "H200", ["-001"]),
        (MASKED, ("torch=2.11", "cudnn=9.26"), "H200", []),
        (MASKED, ("torch=2.15",), "H200", []),
        (MASKED, ("torch=2.11",), "A100", []),
        (MASKED, ("torch=2.11",), None, []),
        (MASKED.replace(", m)", ", None)"), ("torch=2.11",), "H200", []),
        (MASKED, ("torch=2.6",), "MI250X", ["-007"]),
        (MASKED, ("torch=2.4",), None, ["-006"]),
        (NO_GRAD, ("torch=2.10",), None, ["-013"]),
        (NO_GRAD, ("torch=2.11",), None, []),
        (NO_GRAD.replace("target = model", "target = teacher.model"), ("torch=2.10",), None, []),
        (NO_GRAD.replace("bfloat16)", "bfloat16, cache_enabled=False)"), ("torch=2.10",), None, []),
        (NO_GRAD.replace("no_grad", "inference_mode"), ("torch=2.10",), None, []),
        (MODULATED, ("torch=2.13",), None, ["-012"]),
        (MODULATED.replace("torch.compile(Block(8))", "Block(8)"), ("torch=2.13",), None, []),
        (MODULATED + "import os\nos.environ['TORCHINDUCTOR_MIX_ORDER_REDUCTION'] = '0'\n", ("torch=2.13",), None, []),
        (MODULATED.replace("(self.table + t)", "t"), ("torch=2.13",), None, []),
        (FUSED, ("torch=1.13.1",), None, ["-016"]),
        (FUSED, ("torch=2.9",), None, []),
    ],
)
def test_scripts_are_compared_with_the_table(text, versions, gpu, expected):
    """A finding needs the version, the GPU and the feature."""
    assert codes(text, *versions, gpu=gpu) == expected


@pytest.mark.parametrize(
    ("path", "text", "version", "expected"),
    [
        (
            "ds.json",
            '{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
            "0.18.2",
            ["-020"],
        ),
        (
            "ds.json",
            '{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
            "0.19.3",
            ["-021"],
        ),
        (
            "ds.json",
            '{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 0}}',
            "0.18.5",
            ["-019"],
        ),
        (
            "ds.json",
            '{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 0}}',
            "0.18.6",
            [],
        ),
        (
            "ds.json",
            '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 0}}',
            "0.19.8",
            [],
        ),
        (
            "ds.json",
            '{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}',
            "0.18.2",
            [],
        ),
    ],
)
def test_deepspeed_files_are_compared_with_the_table(path, text, version, expected):
    """ZeRO stage and format decide; fp16 without ZeRO has a rule of its own (HS208)."""
    assert codes(text, f"deepspeed={version}", path=path) == expected


ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nmixed_precision: {}\nfsdp_config:\n  fsdp_version: {}\n"
)


@pytest.mark.parametrize(
    ("distributed", "precision", "version", "expected"),
    [
        ("FSDP", "fp16", 2, ["-022"]),
        ("FSDP", "bf16", 2, []),
        ("FSDP", "fp16", 1, []),
        ("'NO'", "fp16", 2, []),
        ("MULTI_GPU", "fp16", 2, []),
    ],
)
def test_accelerate_files_are_compared_with_the_table(distributed, precision, version, expected):
    """FSDP2 with fp16 has the defect; bf16 has no scaler, FSDP1 restores it correctly, and others do not read the block."""
    text = ACCELERATE.format(distributed, precision, version)
    assert codes(text, "accelerate=1.15.0", path="accelerate.yaml") == expected


SHARDED = """\
from accelerate import Accelerator, FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(mixed_precision="fp16"{options})
"""


@pytest.mark.parametrize(
    ("options", "expected"), [(", fsdp_plugin=plugin", ["-022"]), (", fsdp_plugin=None", []), ("", [])]
)
def test_a_plugin_shards_only_with_the_accelerator_that_gets_it(options, expected):
    """An Accelerator without the plugin has no FSDP2 whose state it could load."""
    assert codes(SHARDED.format(options=options), "accelerate=1.15.0") == expected


def test_every_feature_of_a_script_is_recognised():
    """Each feature that an advisory needs and that a script can show has a form that is recognised."""
    in_files = {"deepspeed_stage0", "deepspeed_stage2", "deepspeed_fp16", "deepspeed_bf16", "trainer_accumulation"}
    shown = set()
    for text in (MASKED, NO_GRAD, MODULATED, FUSED, CALLS):
        shown |= features_of_script(ast.parse(text)).keys()
    assert set(FEATURES) - in_files <= shown
    assert {name for advisory in ADVISORIES for name in advisory.features} == set(FEATURES)


def test_a_text_that_shows_a_feature_contains_one_of_its_words():
    """Texts are searched for words before they are parsed, so a missing word would hide the feature."""
    assert set(FEATURE_WORDS) == set(FEATURES)
    for text in (MASKED, NO_GRAD, MODULATED, FUSED, CALLS):
        shown = features_of_script(ast.parse(text)).keys() & set(FEATURES)
        assert [name for name in shown if not any(word in text for word in FEATURE_WORDS[name])] == []


def test_a_text_without_the_words_is_not_parsed(monkeypatch):
    """A script that mentions an advisory's first feature alone cannot meet one that needs two."""
    monkeypatch.setattr("halfstep.check.rules.advisories.features_of_script", lambda _: pytest.fail("was parsed"))
    assert codes("model.generate(x)\n", "torch=2.11", gpu="H200") == []


def test_other_compilations_and_chunks_are_not_torch(tmp_path):
    """`re.compile`, Keras's `compile` and chunks of activations are not the affected features."""
    text = "import re, torch\np = re.compile('x')\nmodel.compile(loss)\na, b = x.chunk(2)\ny = x.to('cpu')\n"
    assert not features_of_script(ast.parse(text)).keys() & {"compile", "shared_modulation", "mps", "half_model"}


def test_pins_of_the_project_are_used_and_named(tmp_path):
    """The message names the requirement file; without a pin or an installed version there is no finding."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").write_text(NO_GRAD)
    (tmp_path / "requirements.txt").write_text("torch==2.10.0\n")
    (finding,) = (f for f in check_path(tmp_path / "train.py") if f.code == "HS401")
    assert "torch 2.10.0 (requirements.txt)" in finding.message
    assert finding.instead.endswith("https://github.com/pytorch/pytorch/issues/112583")
    findings = check_path(tmp_path / "train.py", versions={"torch": "2.13.0"})
    assert not [f for f in findings if f.code == "HS401"]


def test_newer_syntax_is_not_a_failure():
    """A script that this Python cannot parse, and that mentions nothing else, gives no finding."""
    assert codes("class A[T(: pass\nno_grad\n", "torch=2.10") == []
