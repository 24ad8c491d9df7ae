"""Loops of other libraries, run by the libraries themselves: transformers, Accelerate, Lightning."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep.errors import ExpectationError

pytestmark = pytest.mark.slow  # importing transformers takes long


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Llama, saved in bf16 as checkpoints are published."""
    transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(**settings, num_attention_heads=2, num_key_value_heads=1)
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder, **settings):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", **settings)


def step(model, optimizer, dtype=None):
    """One step on a fixed batch; with a dtype under autocast."""
    tokens = torch.arange(16).reshape(2, 8)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()


def test_the_default_dtype_of_transformers_5_has_no_master(checkpoint):
    """from_pretrained of a bf16 checkpoint gives bf16 weights, which AdamW trains without a master."""
    model = load(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with pytest.raises(ExpectationError, match="model.embed_tokens.weight"):
        halfstep.inspect(model, optimizer).expect(master="fp32")
    with halfstep.inspect(model, optimizer) as inspection:
        step(model, optimizer)
    with pytest.raises(ExpectationError, match="states +fp32 +bf16"):
        inspection.expect(states="fp32")
    inspection.expect(weights="bf16", loss="fp32", compute="bf16", grads="bf16")


def test_transformers_in_fp32_under_autocast_is_silent(checkpoint):
    """Loaded in fp32 and computed under autocast; the rotary table, which stays in fp32, is not the model's compute."""
    model = load(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with halfstep.inspect(model, optimizer) as inspection:
        step(model, optimizer, torch.bfloat16)
    inspection.expect(
        weights="fp32", master="fp32", states="fp32", loss="fp32", compute="bf16", grads="fp32", step="applied"
    )


def test_transformers_with_lean_masters_is_silent(checkpoint):
    """The same bf16 weights with a split master and 8-bit states."""
    model = load(checkpoint)
    optimizer = halfstep.optim.AdamW(model.parameters(), lr=1e-5, master="split", states="8bit")
    with halfstep.inspect(model, optimizer) as inspection:
        step(model, optimizer)
    inspection.expect(weights="bf16", master="fp32", states="8bit", loss="fp32", compute="bf16", step="applied")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def test_what_accelerate_prepared_is_unwrapped():
    """Accelerate's optimizer hides torch's, and its autocast is inside the model's forward."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with halfstep.inspect(model, optimizer, accelerator.scaler) as inspection:
        loss = F.cross_entropy(model(torch.ones(2, 8)), torch.tensor([0, 1]))
        accelerator.backward(loss)
        optimizer.step()
    inspection.expect(weights="fp32", master="fp32", states="fp32", compute="bf16", loss="fp32", step="applied")
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_what_lightning_wrapped_is_unwrapped():
    """The optimizer that `self.optimizers()` returns in a LightningModule."""
    core = pytest.importorskip("lightning.pytorch.core.optimizer", reason="lightning is not installed")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with halfstep.inspect(model, core.LightningOptimizer(optimizer)) as inspection:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    inspection.expect(master="fp32", states="fp32", step="applied")


def test_what_fabric_set_up_is_unwrapped():
    """Fabric's bf16-true has no master, its bf16-mixed has fp32 weights; module and optimizer are found in both."""
    fabric = pytest.importorskip("lightning.fabric", reason="lightning is not installed")
    for precision, master in (("bf16-true", "none"), ("bf16-mixed", "fp32")):
        run = fabric.Fabric(accelerator="cpu", devices=1, precision=precision)
        model = net()
        model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters()))
        with halfstep.inspect(model, optimizer) as inspection:
            loss = model(torch.ones(2, 8)).float().square().mean()
            run.backward(loss)
            optimizer.step()
        inspection.expect(master=master, compute="bf16", loss="fp32", step="applied")
        assert ("wrapped in", "FabricModule") in inspection.rows
