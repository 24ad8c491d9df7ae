"""States between layouts and to and from torch's own optimizers."""

import copy
import io

import pytest
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.kernels.split import join, split
from halfstep.optim import SGD, Adam, AdamW, Lion
from halfstep.optim.convert import master_in, plain, restore

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def trained(cls, dtype, steps=3, **options):
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(7, 3), (300,)]]
    optimizer = cls(params, lr=0.01, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize(
    ("cls", "stock", "options"),
    [(AdamW, torch.optim.AdamW, {}), (Adam, torch.optim.Adam, {}), (SGD, torch.optim.SGD, {"momentum": 0.9})],
)
def test_torchs_state_comes_in_without_loss_and_goes_out_again(cls, stock, options):
    """A stock optimizer's state loads into ours, ours back into a stock one, and all three continue alike."""
    params, torchs = trained(stock, FP32, **options)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    ours = cls(copies, lr=0.5, **options)
    ours.load_state_dict(torchs.state_dict())
    back_params = [nn.Parameter(p.detach().clone()) for p in params]
    back = stock(back_params, lr=0.9, **options)
    back.load_state_dict(ours.torch_state_dict())
    for a, b in zip(params, back_params, strict=True):
        for name, value in torchs.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(back.state[b][name])), name
    for sequence, optimizer in ((params, torchs), (copies, ours), (back_params, back)):
        torch.manual_seed(9)
        for p in sequence:
            p.grad = torch.randn_like(p)
        optimizer.step()
    for a, b, c in zip(params, copies, back_params, strict=True):
        assert torch.equal(a, c)
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("source", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("target", ["fp32", "bf16", "8bit"])
def test_moments_change_layout_by_their_values(source, target):
    """The loaded moments are the saved values, rounded as the target stores them and no further."""
    params, saved = trained(AdamW, BF16, master="split", states=source)
    other_params, other = trained(AdamW, BF16, steps=0, master="split", states=target)
    other.load_state_dict(saved.state_dict())
    for p, q in zip(params, other_params, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            mine, theirs = restore(other.state[q], name), restore(saved.state[p], name)
            largest = theirs.abs().max()
            bound = {"fp32": 0.0, "bf16": 2.0**-8 * largest, "8bit": largest / 60}[target]
            assert (mine - theirs).abs().max() <= (0.0 if source == target else bound)
        assert torch.equal(other.state[q]["low"], saved.state[p]["low"])


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("source", "target"), [("split", "fp32"), ("fp32", "split")])
def test_masters_change_layout_exactly(dtype, source, target):
    """A split master becomes an fp32 one of the same value, and back."""
    params, saved = trained(AdamW, dtype, master=source)
    other_params, other = trained(AdamW, dtype, steps=0, master=target)
    for p, q in zip(params, other_params, strict=True):
        q.data.copy_(p)
    other.load_state_dict(saved.state_dict())
    for p, q in zip(params, other_params, strict=True):
        assert torch.equal(saved.master_of(p), other.master_of(q))
        assert torch.equal(p, q)
        assert ("low" in other.state[q]) == (target == "split")


def test_an_fp32_master_loads_into_fp32_weights_and_a_split_one_does_not():
    """An fp32 master becomes the weight; the low half alone cannot be loaded, and the error explains it."""
    params, saved = trained(AdamW, BF16, master="fp32")
    others = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = AdamW(others, lr=0.1)
    optimizer.load_state_dict(saved.state_dict())
    for p, q in zip(params, others, strict=True):
        assert torch.equal(q, saved.master_of(p))
        assert "master" not in optimizer.state[q]
    params, saved = trained(AdamW, BF16, master="split")
    with pytest.raises(SettingError, match="through an Engine"):
        AdamW([nn.Parameter(p.detach().float()) for p in params], lr=0.1).load_state_dict(saved.state_dict())


def test_master_in_and_plain_read_any_layout():
    """`master_in` finds either form or nothing; `plain` leaves torch's entries only."""
    master = torch.randn(20)
    weight, low = split(master, BF16)
    assert torch.equal(master_in({"low": low}, weight), join(weight, low))
    assert torch.equal(master_in({"master": master}, weight), master)
    assert master_in({}, weight) is None
    _, optimizer = trained(AdamW, BF16, master="split", states="8bit")
    stored = optimizer.state_dict()["state"][0]
    for moments in (optimizer.moments, None):
        assert plain(stored, moments).keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(value.dtype is FP32 for value in plain(stored, moments).values())


def test_repr_names_the_layout():
    """The layout is in the optimizer's repr, with torch's list of groups."""
    shown = repr(Lion([nn.Parameter(torch.ones(2))], lr=0.25, states="8bit"))
    assert shown.startswith("Lion (master=policy, states=8bit")
    assert "lr: 0.25" in shown


def test_step_hooks_run_around_a_step():
    """torch's pre and post hooks are called, once each per step."""
    params, optimizer = trained(AdamW, FP32, steps=0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert calls == ["pre", "post"]


def stored(tree):
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def steps(model, engine, seeds):
    for seed in seeds:
        with engine.forward():
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            loss = (model(x).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
    return engine.masters()


@pytest.mark.parametrize("through", [stored, copy.deepcopy], ids=["torch.save", "deepcopy"])
@pytest.mark.parametrize("stock", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("layout", ["states=8bit", "states=bf16", "master=fp32,states=8bit", "master=none,states=8bit"])
def test_a_lean_state_survives_torchs_own_saving_and_loading(layout, stock, through):
    """Saved and loaded by the stock class before Engine(...), with fp32 weights, a run continues bit for bit."""

    def build():
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        return model, stock(model.parameters(), lr=1e-2, **({"momentum": 0.9} if stock is torch.optim.SGD else {}))

    model, optimizer = build()
    engine = Engine(model, optimizer, f"bf16-lean,{layout}")
    steps(model, engine, range(3))
    saved = through((model.state_dict(), optimizer.state_dict()))
    wanted = steps(model, engine, range(3, 6))
    dtypes = {name: value.dtype for name, value in engine.optimizers[0].state[model.weight].items()}
    model, optimizer = build()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    engine = Engine(model, optimizer, f"bf16-lean,{layout}")
    masters = steps(model, engine, range(3, 6))
    assert all(torch.equal(masters[name], wanted[name]) for name in wanted)
    assert {name: value.dtype for name, value in engine.optimizers[0].state[model.weight].items()} == dtypes


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("options", "entry"), [({}, "low"), ({"master": "fp32"}, "master"), ({"states": "8bit"}, "low")]
)
def test_entries_that_torch_cast_to_16_bits_are_rejected(dtype, options, entry):
    """A low half or a master does not fit into 16 bits; the error names the entry and the ways out."""
    params, lean = trained(AdamW, dtype, **options)
    stock = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in params])
    stock.load_state_dict(lean.state_dict())
    with pytest.raises(SettingError, match=f"'{entry}' of an optimizer state was cast to .*before Engine"):
        lean.load_state_dict(stock.state_dict())


def test_codes_that_are_not_integers_are_rejected():
    """A state that was changed after it was saved is not rounded to the nearest code."""
    _, lean = trained(AdamW, BF16, states="8bit")
    state = copy.deepcopy(lean.state_dict())
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].float() + 0.5
    with pytest.raises(SettingError, match="'exp_avg' of an optimizer state contains numbers that are not torch.int8"):
        lean.load_state_dict(state)
