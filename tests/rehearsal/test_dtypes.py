"""Which results are 16-bit: derived from an fp32 step, and as the Engine's region gives them."""

import pytest
import torch

import rehearsal_jobs as jobs
from halfstep.engine.casting import wrap_forwards
from halfstep.engine.region import compute_region
from halfstep.precision.policy import Policy
from halfstep.rehearsal.dtypes import patterns_for, sixteen_bit
from halfstep.rehearsal.observer import Observer
from halfstep.rehearsal.rules import rule_of


def batch_of(job):
    return job.data(batch_size=4, split="train")[0]


def predicted(job, policy):
    """The modules whose last result is 16-bit, by an observed fp32 step."""
    model = job.model(seed=0)
    observer = Observer(model)
    with observer.observe(torch.device("cpu")):
        job.loss(model=model, batch=batch_of(job))
    observer.close()
    kept = {name for name, _ in model.named_modules() if name and policy.keeps_fp32(name)}
    narrow = sixteen_bit(observer.operations, kept)
    last = {op.module: name for name, op in observer.operations.items()}
    return {module: name in narrow for module, name in last.items() if not module.startswith("(")}


def actual(job, policy):
    """The same from the dtypes of module outputs in a region of the Engine."""
    model = job.model(seed=0)
    wrap_forwards(model, policy)
    dtypes = {}
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(lambda m, a, y, name=name: dtypes.update({name: y.dtype is torch.float16}))
    with compute_region("cpu", "fp16"):
        job.loss(model=model, batch=batch_of(job))
    return dtypes


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mlp", "fp16"),
        ("mlp", "fp16,keep_fp32=0"),
        ("residual", "fp16"),
        ("residual", "fp16,keep_fp32=blocks.1.fc2"),
        ("residual", "fp16,keep_fp32=blocks.2"),
        ("attention", "fp16"),
        ("attention", "fp16,keep_fp32=blocks.1.attention"),
        ("attention", "fp16,keep_fp32=embed"),
    ],
)
def test_predicted_dtypes_are_those_of_the_engine(name, precision):
    """Every module that computes something gives the dtype that was derived for it."""
    job, policy = getattr(jobs, name), Policy.parse(precision)
    real = actual(job, policy)
    for module, is_16_bit in predicted(job, policy).items():
        assert real[module] is is_16_bit, module


def test_autocast_that_the_model_turns_off_is_respected():
    """A product in a block with autocast off is fp32."""

    class Careful(torch.nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Careful(4, 4))
    observer = Observer(model)
    with observer.observe(torch.device("cpu")):
        y = model(torch.randn(2, 4))
    observer.close()
    assert y.dtype is torch.float32
    assert {observer.operations[name].module for name in sixteen_bit(observer.operations, ())} == {"0"}


def test_products_inside_torchs_attention_are_seen():
    """nn.MultiheadAttention computes its logits in Python code of torch's."""
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    observer = Observer(model)
    with observer.observe(torch.device("cpu")):
        result = model(x, x, x)[0]
    observer.close()
    assert torch.equal(result, model(x, x, x)[0])
    assert {"bmm", "baddbmm"} & {op.function for op in observer.operations.values()}


def test_rules_of_functions():
    """Products are cast down, sums and losses up, the rest is promoted."""
    rules = {name: rule_of(name, "cpu") for name in ("linear", "softmax", "mse_loss", "add", "add_", "layer_norm")}
    assert list(rules.values()) == ["lower", "fp32", "fp32", "promote", "first", "first"]
    assert rule_of("layer_norm", "cuda") == "fp32"


def test_patterns_cover_what_is_kept_and_nothing_else():
    """Blocks share a pattern where no other module matches it."""
    modules = ["embed", *(f"blocks.{i}{part}" for i in range(3) for part in ("", ".fc1", ".fc2"))]
    assert patterns_for({"blocks.0.fc2", "blocks.1.fc2", "blocks.2.fc2"}, modules) == ("blocks.*.fc2",)
    assert patterns_for({"blocks.0.fc2", "blocks.2.fc2"}, modules) == ("blocks.0.fc2", "blocks.2.fc2")
    assert patterns_for({"embed", "blocks.1"}, modules) == ("blocks.1", "embed")
    assert patterns_for({"blocks.1", "blocks.1.fc1", "blocks.1.fc2"}, modules) == ("blocks.1",)
    for kept in ({"embed", "blocks.0.fc1", "blocks.1.fc1", "blocks.2.fc1"}, {"blocks.0", "blocks.1", "blocks.2"}):
        policy = Policy(compute="fp16", loss_scale="dynamic", keep_fp32=patterns_for(kept, modules))
        assert {m for m in modules if policy.keeps_fp32(m)} == {
            m for m in modules if any(m == k or m.startswith(f"{k}.") for k in kept)
        }
