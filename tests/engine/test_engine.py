"""The Engine as people meet it: its surface, what it rejects, what it says."""

import copy
import gc
import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine_models import LEAN, PRESETS, Net, batches, build, same, snapshot, train_step
from halfstep.engine.engine import Engine
from halfstep.errors import HalfstepError, OverflowStop
from halfstep.kernels.split import FP16_RESIDUAL_BOUND
from halfstep.optim.convert import restore
from halfstep.scaling.scaler import LossScaler, NoScaler, StaticScaler


def loss_of(model, engine, batch):
    with engine.forward():
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("precision", [*PRESETS, *LEAN, "tf32", "auto"])
def test_every_preset_learns(precision):
    """Forty steps bring the loss well below its start."""
    model, _, engine = build(precision, schedule=False, max_norm=1.0)
    stream = batches(40, size=32)
    first = loss_of(model, engine, stream[0]).item()
    for batch in stream:
        result = train_step(model, engine, batch)
        assert result.boundary
    assert loss_of(model, engine, stream[0]).item() < 0.6 * first


def test_step_result_carries_its_own_values():
    """step, boundary, lr, skipped, norm and scale belong to the step they are of, also later."""
    model, _, engine = build("fp16", accumulate=2)
    stream = batches(8)
    results = [train_step(model, engine, b, poison=i in {4, 5}) for i, b in enumerate(stream)]
    assert [r.boundary for r in results] == [False, True] * 4
    assert [r.step for r in results if r.boundary] == [1, 2, 3, 4]
    assert [r.skipped for r in results if r.boundary] == [False, False, True, False]
    assert results[0].grad_norm is None
    assert results[0].scale is None
    assert all(math.isfinite(r.grad_norm) for r in results if r.boundary and not r.skipped)
    assert [r.lr for r in results if r.boundary] == pytest.approx([1e-2, 9e-3, 8.1e-3, 8.1e-3])
    assert "skipped=True" in repr(results[5])
    assert "boundary=False" in repr(results[0])
    assert engine.progress.applied == 3
    assert engine.progress.attempts == 4
    assert engine.progress.micro_batches == 8


def test_the_scheduler_and_hook_see_only_what_happened():
    """A skipped step does not advance the schedule; on_step is notified of both."""
    seen = []
    model, opt, engine = build("bf16", on_step=lambda r: seen.append((r.step, r.skipped)))
    for i, batch in enumerate(batches(5)):
        train_step(model, engine, batch, poison=i == 2)
    assert seen == [(1, False), (2, False), (3, True), (4, False), (5, False)]
    assert engine.schedulers[0].last_epoch == 4
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**4)


def test_a_stuck_run_stops_and_names_its_parameters():
    """max_skips skipped steps in a row raise with the model's own names."""
    model, _, engine = build("bf16", scaler=NoScaler(max_skips=3))
    for _ in range(2):
        train_step(model, engine, batches(1)[0], poison=True)
    with pytest.raises(OverflowStop, match="3 steps in a row"):
        train_step(model, engine, batches(1)[0], poison=True)


def test_several_optimizers_skip_and_step_together():
    """A bad gradient in one optimizer's parameters skips them all: no tower drifts ahead by a step."""
    torch.manual_seed(0)
    model = Net()
    parts = [list(model.inner.parameters()), [p for n, p in model.named_parameters() if not n.startswith("inner")]]
    optimizers = [torch.optim.AdamW(parts[0], lr=1e-2), torch.optim.RMSprop(parts[1], lr=1e-2)]
    engine = Engine(model, optimizers, "fp16", max_norm=1.0)
    train_step(model, engine, batches(1)[0])
    before = snapshot(model, engine)
    handle = model.head.bias.register_hook(lambda g: g * math.inf)
    assert train_step(model, engine, batches(1)[0]).skipped
    handle.remove()
    assert same(before, snapshot(model, engine)) == []
    assert not train_step(model, engine, batches(1)[0]).skipped


def test_several_losses_of_one_micro_batch_add_up():
    """Two backward calls give the gradient of the sum of the losses."""
    norms = []
    for split in (False, True):
        model, _, engine = build("fp32", model=torch.nn.Linear(6, 3), schedule=False)
        x, y = batches(1)[0]
        with engine.forward():
            out = model(x)
            a, b = F.cross_entropy(out, y), out.pow(2).mean()
        if split:
            engine.backward(a, retain_graph=True)
            engine.backward(b)
        else:
            engine.backward(a + b)
        norms.append(engine.step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_frozen_unused_and_tied_parameters_are_fine():
    """Frozen parameters stay, parameters without a gradient are left out, tied weights are stepped once."""

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.unused, self.frozen = (torch.nn.Linear(6, 6) for _ in range(4))
            self.b.weight = self.a.weight
            self.frozen.requires_grad_(requires_grad=False)

        def forward(self, x):
            return self.frozen(self.b(torch.tanh(self.a(x))))

    for precision in PRESETS:
        torch.manual_seed(0)
        model = Odd()
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision, max_norm=1.0)
        frozen, unused = model.frozen.weight.clone(), model.unused.weight.clone()
        for _ in range(3):
            with engine.forward():
                loss = model(torch.ones(2, 6)).float().pow(2).mean()
            engine.backward(loss)
            assert not engine.step().skipped
        assert torch.equal(model.frozen.weight, frozen)
        assert torch.equal(model.unused.weight, unused)
        assert model.a.weight is model.b.weight


def test_sparse_gradients_are_clipped_and_checked_with_duplicates_summed():
    """Rows that appear twice are summed before the check, so a sum that overflows is seen."""
    model = torch.nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    engine = Engine(model, torch.optim.SparseAdam(model.parameters(), lr=0.1), "fp32", max_norm=1.0)
    with engine.forward():
        loss = model(torch.tensor([[1, 1, 2]])).sum()
    engine.backward(loss)
    assert engine.step().grad_norm == pytest.approx(math.sqrt(4 * (2**2 + 1)))
    before = model.weight.clone()
    with engine.forward():
        loss = (model(torch.tensor([[1, 1]])) * 2e38).sum()
    engine.backward(loss)
    assert engine.step().skipped
    assert torch.equal(before, model.weight)


def test_complex_parameters_are_clipped_by_their_true_norm():
    """A complex gradient counts with both parts, on the path that any optimizer can take."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32", max_norm=1.0)
    with engine.forward():
        loss = (model.w.real * 3 + model.w.imag * 4).sum()
    engine.backward(loss)
    assert engine.step().grad_norm == pytest.approx(5 * math.sqrt(3))
    assert (model.w - 1).abs().norm().item() == pytest.approx(1.0, rel=1e-4)


def test_modules_kept_in_fp32_by_pattern():
    """A kept module's weights, inputs and outputs are fp32 in every 16-bit preset."""
    for precision in ("bf16", "fp16", "bf16-lean", "fp16-lean"):
        seen = []
        model = Net()
        model.head.register_forward_hook(lambda _m, args, out, seen=seen: seen.append((args[0].dtype, out.dtype)))
        engine = Engine(model, torch.optim.AdamW(model.parameters()), f"{precision},keep_fp32=head")
        train_step(model, engine, batches(1)[0])
        assert seen[-1][1] is torch.float32
        assert model.head.weight.dtype is torch.float32


def test_activation_checkpointing_gives_the_same_step():
    """Recomputing the forward under the same region changes nothing."""
    from torch.utils.checkpoint import checkpoint

    norms = []
    for recompute in (False, True):
        model, _, engine = build(
            "bf16", model=torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
        )
        x, y = batches(1)[0]
        with engine.forward():
            out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            loss = F.cross_entropy(out, y)
        engine.backward(loss)
        norms.append(engine.step().grad_norm)
    assert norms[0] == norms[1]


def test_a_compiled_model_trains_and_saves_under_its_own_names():
    """torch.compile'd models work, wrapped by the user or in place, and names carry no prefix."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    wrapped = torch.compile(net, backend="aot_eager")
    engine = Engine(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2), "bf16")
    losses = []
    for _ in range(5):
        loss = loss_of(wrapped, engine, batches(1)[0])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert set(engine.state_dict()["model"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_evaluate_computes_in_the_policys_precision_without_gradients():
    """Eval mode, no graph, 16-bit compute inside; training mode is back afterwards, module by module."""
    model, _, engine = build("bf16", ema=0.5)
    model.norm.eval()
    train_step(model, engine, batches(1)[0])
    with engine.evaluate():
        out = model(batches(1)[0][0])
        assert out.dtype is torch.bfloat16
        assert not out.requires_grad
        assert not model.batch.training
    assert model.batch.training
    assert not model.norm.training
    weights = model.head.weight.clone()
    with engine.evaluate(ema=True):
        assert torch.equal(model.head.weight, engine.ema.averages["head.weight"])
    assert torch.equal(model.head.weight, weights)
    with pytest.raises(HalfstepError, match="ema=DECAY"), build("bf16")[2].evaluate(ema=True):
        pass


def test_unscale_lets_people_edit_true_gradients():
    """After unscale() the gradients are true ones, editing is allowed, and the step uses the edited ones."""
    for precision in ("fp32", "fp16", "fp16-lean"):
        model, _, engine = build(precision, "sgd", model=torch.nn.Linear(6, 3), schedule=False)
        engine.backward(loss_of(model, engine, batches(1)[0]))
        engine.unscale()
        assert model.weight.grad.float().norm() < 10
        for p in model.parameters():
            p.grad.fill_(1.0)
        result = engine.step()
        assert result.grad_norm == pytest.approx(math.sqrt(21))
        assert not result.skipped
        engine.backward(loss_of(model, engine, batches(1)[0]))
        engine.unscale()
        model.bias.grad[0] = math.nan
        assert engine.step().skipped


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_16_bit_model_is_rejected_by_presets_with_fp32_weights(half):
    """.half() with an AMP preset raises with the cure."""
    model = Net().to(half)
    with pytest.raises(HalfstepError, match="already has 16-bit weights.*lean"):
        Engine(model, torch.optim.AdamW(model.parameters()), "fp16")


def test_an_optimizer_of_other_parameters_is_rejected():
    """Built before the model was replaced, it would train nothing."""
    with pytest.raises(HalfstepError, match="not in the model"):
        Engine(Net(), torch.optim.AdamW(Net().parameters()), "fp32")


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "1", True])
def test_an_impossible_max_norm_is_rejected(bad):
    """0 would stop training, NaN would poison it."""
    with pytest.raises(HalfstepError, match="max_norm="):
        build("fp32", max_norm=bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_an_impossible_accumulate_is_rejected(bad):
    """Windows have at least one micro-batch."""
    with pytest.raises(HalfstepError, match="accumulate="):
        build("fp32", accumulate=bad)


def test_a_bare_backward_is_noticed():
    """loss.backward() instead of engine.backward(loss) raises at the next call, and says what to write."""
    model, _, engine = build("fp16")
    loss_of(model, engine, batches(1)[0]).backward()
    with pytest.raises(HalfstepError, match=r"engine\.backward\(loss\)"):
        engine.step()
    with pytest.raises(HalfstepError, match="bare loss.backward"):
        engine.backward(loss_of(model, engine, batches(1)[0]))


def test_gradients_edited_between_backward_and_step_are_noticed():
    """Clipping or zeroing by hand raises and points to max_norm and unscale()."""
    model, _, engine = build("fp16")
    engine.backward(loss_of(model, engine, batches(1)[0]))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(HalfstepError, match=r"changed since engine\.backward.*engine\.unscale\(\)"):
        engine.step()
    model, _, engine = build("fp16")
    engine.backward(loss_of(model, engine, batches(1)[0]))
    model.zero_grad()
    with pytest.raises(HalfstepError, match="remove optimizer.zero_grad"):
        engine.step()


def test_step_inside_the_forward_region_is_rejected():
    """Cast weights are cached in the region."""
    model, _, engine = build("bf16")
    with engine.forward():
        loss = F.cross_entropy(model(batches(1)[0][0]), batches(1)[0][1])
        engine.backward(loss)
        with pytest.raises(HalfstepError, match="Leave the block first"):
            engine.step()
    assert not engine.step().skipped


@pytest.mark.parametrize(
    ("loss", "message"),
    [(torch.ones(3, requires_grad=True), r"shape \(3,\)"), (torch.tensor(1.0), "has no graph"), (1.0, "not float")],
)
def test_a_loss_that_cannot_be_one_is_rejected(loss, message):
    """Non-scalar, detached and non-tensor losses raise with the cure."""
    with pytest.raises(HalfstepError, match=message):
        build("fp32")[2].backward(loss)


def test_a_non_finite_loss_skips_its_step_and_stops_a_run_that_has_no_other():
    """One NaN loss costs its step; a run of them ends with an error."""
    model, _, engine = build("fp32", scaler=NoScaler(max_skips=2))
    engine.backward(loss_of(model, engine, batches(1)[0]) * math.nan)
    assert engine.step().skipped
    with pytest.raises(OverflowStop):
        for _ in range(2):
            engine.backward(loss_of(model, engine, batches(1)[0]) * math.nan)
            engine.step()


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "many", torch.ones(2)])
def test_an_impossible_weight_is_rejected(weight):
    """Weights are finite numbers of 0 or more."""
    model, _, engine = build("fp32")
    with pytest.raises(HalfstepError, match="weight"):
        engine.backward(loss_of(model, engine, batches(1)[0]), weight)


def test_contradictions_between_policy_scaler_and_optimizer_are_rejected():
    """fp8 is not built, a scaler must fit the compute format, 8-bit states need a lean optimizer."""
    model = Net()
    with pytest.raises(HalfstepError, match="not implemented yet"):
        Engine(model, torch.optim.AdamW(model.parameters()), "fp8")
    with pytest.raises(HalfstepError, match="no effect under bf16"):
        build("bf16", scaler=LossScaler())
    with pytest.raises(HalfstepError, match="vanish"):
        build("fp16", scaler=NoScaler())
    assert build("fp16", scaler=StaticScaler(128.0))[2].scaler.get_scale() == 128.0
    with pytest.raises(HalfstepError, match="Adafactor"):
        Engine(model, torch.optim.Adafactor(model.parameters()), "bf16-lean,states=8bit")
    with pytest.raises(HalfstepError, match="matches no module"):
        build("bf16,keep_fp32=encoder.*")


def test_schedulers_that_would_do_nothing_are_rejected():
    """A scheduler of another optimizer changes nothing here."""
    model = Net()
    mine, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    with pytest.raises(HalfstepError, match="another optimizer"):
        Engine(model, mine, "fp32", scheduler=torch.optim.lr_scheduler.ExponentialLR(other, 0.9))


def test_a_closed_engine_rejects_and_leaves_the_model_usable():
    """close() undoes the wrapping; the weights stay as trained."""
    model, _, engine = build("bf16-lean,keep_fp32=head")
    with engine:
        train_step(model, engine, batches(1)[0])
    assert "forward" not in vars(model.head)
    with pytest.raises(HalfstepError, match="closed"), engine.forward():
        pass
    engine.close()


def test_close_puts_deterministic_algorithms_back_as_they_were():
    """deterministic=True lasts as long as the engine, and does not switch off what the user had switched on."""
    for before in (False, True):
        torch.use_deterministic_algorithms(before)
        try:
            engine = build("fp32", deterministic=True)[2]
            assert torch.are_deterministic_algorithms_enabled()
            engine.close()
            assert torch.are_deterministic_algorithms_enabled() is before
        finally:
            torch.use_deterministic_algorithms(False)


# --- state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [*PRESETS, *LEAN])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_save_and_load_resume_bit_for_bit(precision, optimizer, tmp_path):
    """Steps after loading equal steps without having stopped, average, schedule and scale included."""
    stream = batches(8)
    model, _, engine = build(precision, optimizer, ema=0.9, max_norm=1.0)
    for i, batch in enumerate(stream[:4]):
        train_step(model, engine, batch, poison=i == 2)
    engine.save(tmp_path / "there", note="extra")
    resumed_model, _, resumed = build(precision, optimizer, ema=0.9, max_norm=1.0, seed=9)
    assert resumed.load(tmp_path / "there") == {"note": "extra"}
    for batch in stream[4:]:
        train_step(model, engine, batch)
        train_step(resumed_model, resumed, batch)
    assert same(snapshot(model, engine), snapshot(resumed_model, resumed)) == []
    assert resumed.progress.attempts == engine.progress.attempts == 8
    assert resumed.progress.applied == 7


def test_random_numbers_go_on_after_load(tmp_path):
    """Dropout after a resume draws what it would have drawn."""
    import random

    import numpy as np

    _, _, engine = build("fp32")
    engine.save(tmp_path / "there")
    drawn = (torch.rand(3).tolist(), random.random(), np.random.rand())  # noqa: NPY002
    engine.load(tmp_path / "there")
    assert drawn == (torch.rand(3).tolist(), random.random(), np.random.rand())  # noqa: NPY002


def test_saving_inside_a_window_is_rejected():
    """Half a window's gradients would be lost without a word."""
    model, _, engine = build("fp32", accumulate=2)
    train_step(model, engine, batches(1)[0])
    with pytest.raises(HalfstepError, match="inside a window"):
        engine.state_dict()
    engine.step(last=True)
    engine.state_dict()


@pytest.mark.parametrize(
    ("precision", "change", "message"),
    [
        ("fp32", {"ema": 0.9}, "no EMA"),
        ("fp32", {"model": Net(16)}, "16"),
        ("fp32", {"schedule": False}, "schedulers"),
    ],
)
def test_a_state_that_does_not_fit_is_rejected_before_anything_changes(precision, change, message):
    """Another model, average or schedule raises, and the engine is as it was."""
    source = build("fp32")[2].state_dict()
    model, _, engine = build(precision, **change)
    before = snapshot(model, engine)
    with pytest.raises(HalfstepError, match=message):
        engine.load_state_dict(source)
    assert same(before, snapshot(model, engine)) == []


def test_presets_with_fp32_weights_exchange_states_and_a_newer_state_is_rejected(caplog):
    """fp16 continues from bf16's weights only with its own scaler; the same layout under another name is said."""
    state = build("fp32")[2].state_dict()
    build("bf16")[2].load_state_dict(copy.deepcopy(state))
    assert "continuing under bf16" in caplog.text
    with pytest.raises(HalfstepError, match="version"):
        build("fp32")[2].load_state_dict(state | {"version": 99})


LAYOUTS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean", "bf16-lean,states=8bit", "bf16-lean,master=fp32")


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(LAYOUTS, 2)))
def test_a_run_continues_in_any_other_layout(source, target, caplog):
    """Masters are the same numbers, moments too unless the target rounds them, and the change is said."""
    model, _, engine = build(source)
    for batch in batches(3):
        train_step(model, engine, batch)
    wanted, state = engine.masters(), copy.deepcopy(engine.state_dict())
    other_model, _, other = build(target)
    other.load_state_dict(state)
    assert f"saved under {engine.policy}; continuing under {other.policy}" in caplog.text
    for name, master in other.masters().items():
        tiny = FP16_RESIDUAL_BOUND if "fp16-lean" in (source, target) else 0.0
        assert (master - wanted[name]).abs().max() <= tiny, name
    if "states" not in target:
        theirs, ours = (o.optimizers[0].state_dict()["state"] for o in (engine, other))
        for index, entry in ours.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(entry[moment].float(), restore(theirs[index], moment))
            assert float(entry["step"]) == float(theirs[index]["step"])
    results = [train_step(other_model, other, batch) for batch in batches(2)]
    assert not any(result.skipped for result in results)
    assert other.progress.applied == 5


def test_the_truth_table_is_logged_once_and_can_be_asked_for(caplog):
    """It appears at the first step, shows what is there, and is part of the state."""
    model, _, engine = build("bf16-lean")
    assert "from the first step on" not in str(engine.truth())
    for batch in batches(3):
        train_step(model, engine, batch)
    assert caplog.text.count("truth table") == 1
    truth = engine.truth()
    assert dict(truth.rows)["gradients"].startswith("bf16")
    assert engine.state_dict()["truth"]["rows"]["precision"] == "bf16-lean"


def test_an_engine_does_not_keep_old_gradients_alive():
    """After a step no gradient tensor survives."""
    model, _, engine = build("fp32", model=torch.nn.Linear(50, 50))
    with engine.forward():
        loss = model(torch.ones(1, 50)).sum()
    engine.backward(loss)
    engine.step()
    gc.collect()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-lean", "fp16-lean"])
def test_a_dropped_engine_frees_its_tensors_at_once(precision):
    """Weights and optimizer states go with the last name for them, without waiting for a garbage collection."""

    def train():
        model = nn.Linear(8, 4)
        engine = Engine(model, torch.optim.AdamW(model.parameters()), precision, max_norm=1.0)
        for _ in range(2):
            with engine.forward():
                loss = model(torch.ones(2, 8)).sum()
            engine.backward(loss)
            engine.step()
        states = [t for s in engine.optimizers[0].state.values() for t in s.values()]
        return [weakref.ref(t) for t in (model.weight, *states)]

    train()  # what is made once in a process stays
    gc.disable()
    try:
        left = train()
        assert len(left) > 1
        assert all(ref() is None for ref in left)
    finally:
        gc.enable()


def test_the_loud_stop_names_the_parameters():
    """The gradients of the step that stopped the run are still there to be looked at, and are cleared after it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    engine = Engine(model, torch.optim.SGD(model.parameters()), "fp32", scaler=NoScaler(max_skips=3))
    model[1].weight.register_hook(lambda grad: grad * float("inf"))
    for _ in range(2):
        engine.backward(model(torch.ones(1, 2)).sum())
        engine.step()
    engine.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(OverflowStop, match=r"non-finite gradients: 1.weight \(4 of 4\)\."):
        engine.step()
    assert all(p.grad is None for p in model.parameters())
    assert not engine.in_window


def test_a_save_from_on_step_works():
    """The hook is called with the window closed."""
    states = []
    model, _, engine = build("fp32", on_step=lambda _: states.append(engine.state_dict()))
    for batch in batches(2):
        train_step(model, engine, batch)
    assert [s["counters"]["applied"] for s in states] == [1, 2]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-lean"])
def test_parameters_that_come_later_are_rejected(precision):
    """A group added to the optimizer would be stepped unchecked and unclipped; a new Engine takes it."""
    model = Net()
    optimizer = torch.optim.AdamW(model.inner.parameters())
    engine = Engine(model, optimizer, precision, max_norm=1.0)
    train_step(model, engine, batches(1)[0])
    late = {"params": list(model.head.parameters())}
    with pytest.raises(HalfstepError, match=r"add_param_group\(\) on the AdamW of an Engine.*build a new Engine"):
        optimizer.add_param_group(late)
    engine.close()
    optimizer.add_param_group(late)
    engine = Engine(model, optimizer, precision, max_norm=1.0)
    before = engine.masters()["head.weight"].clone()
    train_step(model, engine, batches(1)[0])
    assert not torch.equal(engine.masters()["head.weight"], before)


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16"])
def test_a_parameter_unfrozen_later_has_an_fp32_average(precision):
    """Frozen or not when the Engine is made, what is averaged is fp32, so that small steps are not lost."""
    model = Net()
    model.inner.requires_grad_(False)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1e-3), precision, ema=0.99)
    model.inner.requires_grad_(True)
    for batch in batches(3):
        train_step(model, engine, batch)
    assert {average.dtype for average in engine.ema.averages.values()} == {torch.float32}
    assert not torch.equal(engine.ema.averages["inner.weight"], engine.masters()["inner.weight"])


def test_masters_of_complex_weights_are_whole():
    """A complex parameter is its own master, imaginary part included."""
    model = nn.Linear(3, 2, dtype=torch.complex64)
    engine = Engine(model, torch.optim.SGD(model.parameters()), "fp32")
    assert torch.equal(engine.masters()["weight"], model.weight)


def test_a_scheduler_past_its_end_says_what_it_counts():
    """OneCycleLR made for too few updates stops the run with the number and the way out."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    engine = Engine(model, optimizer, "fp32", scheduler=scheduler)
    for _ in range(2):
        engine.backward(model(torch.ones(1, 2)).sum())
        engine.step()
    engine.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(HalfstepError, match=r"OneCycleLR could not be stepped after update 3.*once per update"):
        engine.step()


@pytest.mark.parametrize("second", [None, 100, torch.tensor(100)], ids=str)
def test_a_second_loss_weighs_as_much_as_its_micro_batch(second):
    """Two losses of one weighted micro-batch add up, whether or not the weight is said again."""
    model = nn.Linear(2, 1, bias=False)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32")
    out = model(torch.tensor([[3.0, 4.0]])).sum()
    engine.backward(out, weight=100, retain_graph=True)
    engine.backward(out, weight=second)
    assert engine.step().grad_norm == pytest.approx(10.0)


def test_one_micro_batch_has_one_weight():
    """A second loss with another weight is rejected instead of being given the first one's."""
    model = nn.Linear(2, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters()), "fp32")
    out = model(torch.ones(1, 2)).sum()
    engine.backward(out, weight=100, retain_graph=True)
    with pytest.raises(HalfstepError, match=r"weight=7\) for another loss of a micro-batch whose weight is 100"):
        engine.backward(out, weight=7)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_unscaling_fp16_gradients_loses_none(accumulate):
    """A gradient that fp16 holds only because of the loss scale is still there after unscale()."""
    model = nn.Linear(1, 1, bias=False)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16-lean", accumulate=accumulate)
    for _ in range(2):
        with engine.forward():
            loss = model(torch.ones(1, 1)).float().sum() * 1e-8
        engine.backward(loss)
        engine.unscale()
        assert model.weight.grad.item() == pytest.approx(1e-8, rel=1e-3)
        model.weight.grad.mul_(2)
        assert engine.step(last=True).grad_norm == pytest.approx(2e-8, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-lean"])
@pytest.mark.parametrize("name", ["adamw", "sgd-dampened", "rmsprop"])
def test_an_optimizer_step_left_in_the_loop_is_rejected(precision, name):
    """It would use scaled gradients a second time; after close() the optimizer is the user's own again."""
    model, optimizer, engine = build(precision, name, schedule=False)
    train_step(model, engine, batches(1)[0])
    engine.backward(loss_of(model, engine, batches(1)[0]))
    before = snapshot(model, engine)
    with pytest.raises(HalfstepError, match=r"engine.step\(\)"):
        optimizer.step()
    assert same(before, snapshot(model, engine)) == []
    assert not engine.step().skipped
    engine.close()
    if precision == "fp32":
        optimizer.step()


class Unusual(torch.optim.SGD):
    """An optimizer without a learning rate in its groups, and with entries of its own among the states."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            del group["lr"]
        self.state["k"], self.state["total"] = torch.zeros(1), 0

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data -= 0.1 * p.grad


def test_unusual_optimizers_are_stepped():
    """Third-party optimizers may have no lr, and states that belong to no parameter."""
    model = torch.nn.Linear(6, 3)
    before = model.weight.detach().clone()
    engine = Engine(model, Unusual(model.parameters()), "fp32")
    result = train_step(model, engine, batches(1)[0])
    assert math.isnan(result.lr)
    assert not torch.equal(before, model.weight)
