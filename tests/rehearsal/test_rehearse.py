"""The call: its rows, its checks, and that it leaves nothing behind."""

import functools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import rehearsal_jobs as jobs
from halfstep.errors import HalfstepError, SettingError
from halfstep.jobs.job import Job
from halfstep.rehearsal import rehearse


@functools.cache
def result():
    return rehearse(jobs.mlp, steps=2, batch=16)


def row(rehearsal, module, kind):
    return next(r for r in rehearsal.rows if (r.module, r.kind) == (module, kind))


def test_rows_have_the_range_of_every_module_and_kind():
    """Products have all kinds; counts add up over the steps, and the range is that of a plain fp32 step."""
    kinds = {r.kind for r in result().rows if r.module == "3"}
    assert kinds == {"activation", "activation gradient", "weight gradient", "weight", "update"}
    assert row(result(), "0", "activation").stats.numel == 2 * 16 * 32
    weight = row(rehearse(jobs.mlp, steps=1, batch=16), "0", "weight").stats
    parameters = [p.detach().abs() for p in jobs.mlp.model(seed=0)[0].parameters()]
    assert weight.largest == max(p.max() for p in parameters)
    assert weight.numel == sum(p.numel() for p in parameters)


def test_gradients_are_those_of_the_loss():
    """The largest gradient of each kind is the one that autograd computes."""
    rehearsal = rehearse(jobs.mlp, steps=1, batch=16)
    model = jobs.mlp.model(seed=0)
    outputs = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, a, y, name=name: outputs.update({name: y}))
    loss = jobs.mlp.loss(model=model, batch=jobs.mlp.data(batch_size=16, split="train")[0])
    for y in outputs.values():
        y.retain_grad()
    loss.backward()
    for name, y in outputs.items():
        assert row(rehearsal, name, "activation gradient").stats.largest == y.grad.abs().max()
        assert row(rehearsal, name, "activation").stats.largest == y.abs().max()
    assert row(rehearsal, "0", "weight gradient").stats.largest == max(
        p.grad.abs().max() for p in model[0].parameters()
    )


def test_block_formats_are_measured_on_the_tensors():
    """Errors of MXFP8 are a few per cent, of NVFP4 about ten."""
    blocks = row(result(), "3", "activation").blocks
    assert 0.01 < blocks["mxfp8"].error < 0.05 < blocks["nvfp4"].error < 0.2


def test_json_has_everything():
    """The dictionary survives JSON, with no NaN or inf in it."""
    data = json.loads(json.dumps(result().as_dict(), allow_nan=False))
    assert (data["schema"], data["job"], data["steps"], data["policy"]) == (1, "mlp", 2, "fp16")
    first = data["rows"][0]
    assert set(first["formats"]) == {"fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2"}
    assert sum(first["exponents"].values()) + round(first["zeros"] * first["numel"]) == first["numel"]
    assert data["proposal"]["policy"].startswith("fp16")
    assert str(result()).splitlines()[:2] == ["mlp in fp16", "no overflow or underflow predicted"]


def test_risks_are_stated_as_not_observed():
    """A tensor close to the limit is a risk, not a trouble."""

    def loss(model, batch):
        return F.cross_entropy(model(batch[0] * 9000), batch[1])

    rehearsal = rehearse(Job(jobs.mlp.model, jobs.mlp.data, loss, jobs.mlp.optimizer), steps=1, batch=16)
    assert rehearsal.troubles == ()
    assert ("0", "activation") in {(r.module, r.kind) for r in rehearsal.risks}
    assert all(0 <= r.margin < 3 for r in rehearsal.risks)
    assert all(not risk["observed"] for risk in rehearsal.as_dict()["risks"])


def test_nothing_is_left_behind():
    """The job's own model, the random numbers, autocast and hooks are as before."""
    torch.manual_seed(7)
    model = jobs.mlp.model(seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    rehearse(Job(lambda: model, jobs.mlp.data, jobs.mlp.loss, jobs.mlp.optimizer), steps=1, batch=16)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not model[0]._forward_hooks
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_that_diverges_in_fp32_is_an_error():
    """No format can be better than fp32."""

    def loss(model, batch):
        return model(batch[0]).sum() * math.nan

    with pytest.raises(HalfstepError, match="nan in fp32 at step 1"):
        rehearse(Job(jobs.mlp.model, jobs.mlp.data, loss, jobs.mlp.optimizer), steps=1, batch=16)


class Checkpointed(torch.nn.Sequential):
    """Computes its activations again in the backward pass."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_checkpointed_and_compiled_models_are_observed():
    """The same rows as without; what is computed again is fp32 and is not counted twice."""
    plain = {(r.module, r.kind): r.stats for r in result().rows}
    variants = {
        "": lambda seed: Checkpointed(*jobs.mlp.model(seed=seed)),
        "_orig_mod.": lambda seed: torch.compile(jobs.mlp.model(seed=seed), backend="eager"),
    }
    for prefix, model in variants.items():
        rows = rehearse(Job(model, jobs.mlp.data, jobs.mlp.loss, jobs.mlp.optimizer), steps=2, batch=16).rows
        assert {(r.module.removeprefix(prefix), r.kind): r.stats.bins for r in rows} == {
            key: stats.bins for key, stats in plain.items()
        }


def test_sparse_gradients_are_counted_by_their_values():
    """An embedding with sparse gradients, which an optimizer for them trains."""
    job = Job(
        lambda: torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 10)),
        lambda batch_size, split: [torch.arange(batch_size) % 3] * 2,
        lambda model, batch: F.cross_entropy(model(batch), batch),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    rehearsal = rehearse(job, steps=1, batch=4, max_norm=None)
    assert row(rehearsal, "0", "weight gradient").stats.numel in (3 * 4, 4 * 4)


@pytest.mark.parametrize(
    ("precision", "settings", "message"),
    [
        ("fp32", {}, "fp16 and bf16 compute"),
        ("fp16-lean", {}, "fp16 and bf16 compute"),
        ("fp61", {}, "Unknown precision"),
        ("fp16,keep_fp32=nothing", {}, "matches no module"),
        ("fp16", {"steps": 0}, "steps=0"),
        ("fp16", {"batch": 0}, "batch=0"),
        ("fp16", {"data_dir": "images"}, "no effect on a Job"),
    ],
)
def test_wrong_settings_raise(precision, settings, message):
    """With the value and what to write instead."""
    with pytest.raises(SettingError, match=message):
        rehearse(jobs.mlp, precision, **{"batch": 16} | settings)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["residual", "attention", "sigmoids", "mlp"])
def test_a_gpu_finds_the_same(name):
    """Layers and proposal on a GPU, where layer norm gives fp32, are those of a CPU for models without a doubt."""
    job = getattr(jobs, name)
    here, there = (rehearse(job, steps=2, batch=16, device=device) for device in ("cpu", "cuda"))
    assert there.device.startswith("cuda")
    assert {t.module for t in there.troubles} <= {t.module for t in here.troubles}
    assert there.proposal.keep_fp32 == here.proposal.keep_fp32
