"""Set-up: the same prepared run for the Engine and for the planner."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.engine.setup import prepare_run
from halfstep.errors import SettingError
from halfstep.optim import AdamW
from halfstep.precision.policy import Policy


def model():
    """A layer that lean presets cast and one that they do not."""
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-lean", "fp16-lean", "bf16-lean,states=8bit"])
def test_fake_tensors_are_prepared_as_real_ones(precision):
    """Dtypes, ways of stepping and stored masters of a plan are those of a run."""
    prepared = []
    for mode in (None, FakeTensorMode(allow_non_fake_inputs=True)):
        with mode or torch.enable_grad():
            net = model()
            run = prepare_run(net, [torch.optim.AdamW(net.parameters())], Policy.parse(precision), accumulate=2)
            states = [
                {key: (value.dtype, tuple(value.shape)) for key, value in run.optimizers[0].state.get(p, {}).items()}
                for p in run.params.values()
            ]
            dtypes = {name: (p.dtype, p.grad_dtype) for name, p in run.params.items()}
            prepared.append((dtypes, states, [path.kind for path in run.paths]))
            run.undo.close()
    assert prepared[0] == prepared[1]


def test_nothing_is_changed_by_a_run_that_is_rejected():
    """A weight outside fp16's range leaves model and optimizer as they were."""
    net = model()
    with torch.no_grad():
        net[0].weight[0, 0] = 1e6
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(SettingError, match="outside the range of fp16"):
        prepare_run(net, [optimizer], Policy.parse("fp16-lean"))
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert "forward" not in vars(net[0])
    optimizer.step()  # not adopted: its own step still works


@pytest.mark.parametrize(
    ("precision", "optimizer", "reason"),
    [
        ("bf16-lean,states=8bit", torch.optim.Adafactor, "states=8bit has no effect on Adafactor"),
        ("bf16-lean,master=none", torch.optim.Adafactor, "Omit master=none"),
        ("bf16-lean,states=bf16", torch.optim.Adagrad, "Adagrad cannot store its moments with states=bf16"),
        ("bf16-lean,states=8bit", lambda params: torch.optim.Adam(params, amsgrad=True), "amsgrad"),
        ("bf16-lean", lambda params: AdamW(params, master="fp32"), "built with master='fp32'"),
        ("bf16-lean,keep_fp32=nothing", torch.optim.AdamW, "matches no module"),
    ],
)
def test_what_does_not_fit_the_policy_is_rejected_before_the_weights_are_cast(precision, optimizer, reason):
    """An optimizer that cannot be adopted and a pattern without a module leave the model in fp32."""
    net = model()
    with pytest.raises(SettingError, match=reason):
        prepare_run(net, [optimizer(net.parameters())], Policy.parse(precision))
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_masters_are_the_values_before_rounding():
    """`master_of` returns fp32 exactly as the model had it."""
    net = model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    run = prepare_run(net, [torch.optim.AdamW(net.parameters())], Policy.parse("bf16-lean"))
    assert net[0].weight.dtype is torch.bfloat16
    for name, param in run.params.items():
        assert torch.equal(run.master_of(param), before[name])


def test_undo_restores_the_forwards_and_keeps_the_weights():
    """After the Engine is closed the model is the user's again, as trained."""
    net = model()
    run = prepare_run(net, [AdamW(net.parameters())], Policy.parse("bf16-lean,keep_fp32=0"))
    assert "forward" in vars(net[0])
    run.undo.close()
    assert "forward" not in vars(net[0])


def test_fp8_is_rejected_with_what_to_use():
    """Named, not implemented, and the error says which preset stores weights the same way."""
    net = model()
    with pytest.raises(SettingError, match="not implemented yet.*bf16-lean"):
        prepare_run(net, [torch.optim.AdamW(net.parameters())], Policy.parse("fp8"))
