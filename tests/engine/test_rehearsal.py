"""Kernels compiled ahead: nothing to do on a CPU; on a GPU the first step finds all of them."""

import contextlib

import pytest
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.engine.rehearsal import start_rehearsal
from halfstep.engine.setup import prepare_run
from halfstep.precision.policy import Policy
from halfstep.scaling.scaler import NoScaler


def prepared(precision, device):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    return prepare_run(model, [optimizer], Policy.parse(precision))


@pytest.mark.parametrize("precision", ["bf16-lean", "bf16"])
def test_a_cpu_has_nothing_to_compile(precision):
    """No thread is started, and waiting returns at once."""
    wait = start_rehearsal(prepared(precision, "cpu"), NoScaler(), 1.0)
    assert not hasattr(wait, "__self__")  # of a thread
    wait()


@contextlib.contextmanager
def compilations():
    """The names of the Triton kernels that are compiled inside the block."""
    from triton import knobs

    names, before = [], knobs.runtime.jit_post_compile_hook

    def record(*, fn, **_):
        names.append(fn.name)

    knobs.runtime.jit_post_compile_hook = record
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch._inductor")  # of torch's compiler
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Requires: [a CUDA device]")
@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16-lean,states=8bit"])
@pytest.mark.parametrize("num_layers", [1, 7])
def test_the_first_steps_compile_no_kernel_of_the_step(precision, num_layers):
    """Whatever the number and alignment of the tensors: the kernels of a step exist when it begins."""
    layers = [nn.Linear(64, 64, bias=i % 2 == 0) for i in range(num_layers)]
    model = nn.Sequential(*layers, nn.Linear(64, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, optimizer, precision, max_norm=1.0, compile=True)
    engine._await_kernels()
    with compilations() as names:
        for _ in range(2):
            with engine.forward():
                loss = model(torch.randn(8, 64, device="cuda")).square().mean()
            engine.backward(loss)
            engine.step()
    own = [
        name for name in names if "halfstep" in name or name.lstrip("_").startswith(("lean", "sumsq", "judge", "adamw"))
    ]
    assert own == []
    engine.close()
