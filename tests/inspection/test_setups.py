"""Set-ups that people build by hand: three that are right, on which expect() is silent, and three with one mistake each."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.errors import ExpectationError

X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def rows(inspection, **expected):
    """What expect() reports, by key: what there is, and the first names."""
    try:
        inspection.expect(**expected)
    except ExpectationError as error:
        lines = [line.split() for line in str(error).splitlines()[2:]]
        return {words[0]: " ".join(words[2:]) for words in lines if words[0] in expected}
    return {}


class Adapter(nn.Module):
    """LoRA on a frozen bf16 layer."""

    def __init__(self, base, dtype):
        super().__init__()
        self.base = base.bfloat16().requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=dtype)

    def forward(self, x):
        return self.base(x.bfloat16()) + self.up(self.down(x.to(self.up.weight.dtype))).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_a_frozen_16_bit_model(dtype):
    """fp32 adapters are right; adapters in the dtype of the model have no master."""
    model = nn.Sequential(*(Adapter(m, dtype) if isinstance(m, nn.Linear) else m for m in net()))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with halfstep.inspect(model, optimizer) as step:
        F.cross_entropy(model(X).float(), Y).backward()
        optimizer.step()
    reported = rows(step, frozen="bf16", master="fp32", states="fp32", loss="fp32", step="applied")
    assert set(reported) == (set() if dtype is torch.float32 else {"master", "states"})
    assert dtype is torch.float32 or reported["master"].startswith("none 0.down.weight, 0.up.weight")


@pytest.mark.parametrize("wide", [True, False])
def test_masters_that_a_loop_keeps_itself(wide):
    """fp32 copies that the optimizer steps are masters; micro-batches that are added up in bf16 are the mistake."""
    model = net().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    with halfstep.inspect(model, optimizer) as step:
        for _ in range(2):
            F.cross_entropy(model(X.bfloat16()).float(), Y).backward()
            for param, master in zip(model.parameters(), masters, strict=True) if wide else ():
                master.grad = param.grad.float() if master.grad is None else master.grad + param.grad.float()
                param.grad = None
        for param, master in zip(model.parameters(), masters, strict=True) if not wide else ():
            master.grad = param.grad.float()
        optimizer.step()
    reported = rows(step, weights="bf16", master="fp32", states="fp32", accumulate="fp32|none")
    assert reported == ({} if wide else {"accumulate": "bf16 0.weight, 0.bias, 2.weight and 1 more"})


@pytest.mark.parametrize("mistake", [False, True])
def test_two_models_with_one_scaler(mistake):
    """A GAN in fp16 is right; a generator whose last layer was cast is the mistake, and only that layer is named."""
    models = {"generator": net(), "critic": net()}
    if mistake:
        models["generator"][2].to(torch.bfloat16)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models.values()]
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with halfstep.inspect(models, optimizers, scaler) as step:
        for model, optimizer in zip(models.values(), optimizers, strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(X).float(), Y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        scaler.update()
    correct = {"master": "fp32", "states": "fp32", "compute": "fp16", "loss": "fp32", "scaler": "dynamic"}
    reported = rows(step, **correct, step="applied")
    assert set(reported) == ({"master", "states"} if mistake else set())
    assert not mistake or reported["master"].endswith("generator.2.weight, generator.2.bias")
