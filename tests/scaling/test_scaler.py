"""Loss scalers: their methods, their counts, the hard stop, and exchange of state."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_sync import no_synchronisation
from halfstep.errors import HalfstepError, OverflowStop
from halfstep.precision.loss_scale import SEMANTICS, LossScale
from halfstep.scaling.scaler import LossScaler, NoScaler, ScalerCounts, StaticScaler, make_scaler
from scaler_rules import RULES


def test_defaults_are_deepspeeds_tuned_settings():
    """2^16, interval 1000, hysteresis 2, minimum 1, maximum 2^24, stop after 100 skips."""
    rule = LossScaler().settings
    assert rule == LossScale("dynamic", "deepspeed", 65536.0, 2.0, 0.5, 1000, 2, 1.0, 2.0**24, 100)


def test_scaled_loss_scales_every_gradient():
    """backward through scale(loss) gives the gradient times the scale."""
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    LossScaler(init_scale=1024.0).scale((weight**2).sum()).backward()
    assert weight.grad.tolist() == [2048.0, -4096.0]


def test_a_16_bit_loss_is_scaled_in_fp32_with_a_warning(caplog):
    """An fp16 loss would overflow at 65536; the product is fp32, and one warning is logged."""
    scaler = LossScaler()
    loss = torch.tensor(3.0, dtype=torch.float16)
    assert scaler.scale(loss).dtype is torch.float32
    assert scaler.scale(loss).item() == 3 * 65536
    assert len([r for r in caplog.records if "float16" in r.getMessage()]) == 1


@pytest.mark.parametrize("loss", [3.0, torch.tensor(3), None])
def test_a_loss_that_is_not_a_float_tensor_is_rejected(loss):
    """scale() accepts only floating-point tensors."""
    with pytest.raises(HalfstepError, match="floating-point loss"):
        LossScaler().scale(loss)


def test_a_flag_with_several_elements_is_rejected():
    """update() accepts one flag and suggests how to reduce several."""
    with pytest.raises(HalfstepError, match="amax"):
        LossScaler().update(torch.zeros(2))


def test_a_flag_of_shape_one_is_accepted():
    """Flags of shape (1,), as FSDP1's scaler makes them, are accepted."""
    scaler = LossScaler(hysteresis=1)
    scaler.update(torch.ones(1))
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize(
    "scaler", [LossScaler(hysteresis=1), StaticScaler(8.0), NoScaler()], ids=lambda s: type(s).__name__
)
def test_every_scaler_counts_its_skips(scaler):
    """All scalers count skips and consecutive skips."""
    for flag in (0.0, 1.0, 1.0, 0.0, 1.0):
        scaler.update(flag)
    assert scaler.counts() == ScalerCounts(updates=5, skips=3, consecutive_skips=1)


def test_no_scaler_does_not_change_the_loss():
    """NoScaler returns the same tensor object, and its scale is 1."""
    loss = torch.tensor(2.0)
    assert NoScaler().scale(loss) is loss
    assert NoScaler().get_scale() == 1.0


def test_static_scaler_keeps_its_scale():
    """A static scale does not change on overflow."""
    scaler = StaticScaler(128)
    scaler.update(1.0)
    assert scaler.get_scale() == 128.0
    assert scaler.scale(torch.tensor(1.0)).item() == 128.0


@pytest.mark.parametrize("text", ["none", "128", "dynamic", "dynamic(semantics=megatron;init_scale=8.0)"])
def test_make_scaler_follows_the_settings(text):
    """The scaler that is built has exactly those settings."""
    assert str(make_scaler(LossScale.parse(text)).settings) == text


def bad_parameters():
    good, bad, unused = (torch.nn.Parameter(torch.zeros(4)) for _ in range(3))
    good.grad, bad.grad = torch.ones(4), torch.tensor([1.0, math.inf, math.nan, 0.0])
    return {"encoder.weight": good, "head.bias": bad, "unused": unused}


@pytest.mark.parametrize("make", [LossScaler, StaticScaler, NoScaler])
def test_too_many_skips_stop_the_run_and_name_the_parameters(make):
    """The max_skips-th skip in a row raises an error that names only the non-finite gradients."""
    scaler = make(max_skips=3)
    params = bad_parameters()
    for flag in (1.0, 1.0, 0.0, 1.0, 1.0):
        scaler.update(flag, params.items())
    with pytest.raises(OverflowStop) as error:
        scaler.update(1.0, params.items())
    assert "head.bias (2 of 4)" in str(error.value)
    assert "encoder" not in str(error.value)
    assert "3 steps in a row" in str(error.value)


def test_the_stop_explains_why_it_names_nothing():
    """Without parameters, or with cleared gradients, the error states that."""
    with pytest.raises(OverflowStop, match="named_params="):
        LossScaler(max_skips=1).update(1.0)
    with pytest.raises(OverflowStop, match="No parameter has"):
        LossScaler(max_skips=1).update(1.0, [("w", torch.nn.Parameter(torch.zeros(1)))])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11, whatever is passed
def test_the_stop_names_sparse_gradients_and_the_minimum_scale():
    """Duplicate indices that sum to inf are detected, and the message states that the scale is at its minimum."""
    weight = torch.nn.Parameter(torch.zeros(3, 1))
    huge = torch.full((2, 1), 3e38)
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), huge, (3, 1), check_invariants=False)
    with pytest.raises(OverflowStop, match=r"its minimum.*embedding \(1 of 1\)"):
        LossScaler(init_scale=1.0, max_skips=1).update(1.0, [("embedding", weight)])


def test_max_skips_none_never_stops():
    """With max_skips=None the run continues at the minimum scale."""
    scaler = LossScaler(max_skips=None, init_scale=4.0, hysteresis=1)
    for _ in range(300):
        scaler.update(1.0)
    assert scaler.get_scale() == 1.0
    assert scaler.counts().skips == 300


def test_scale_never_reaches_zero_where_torchs_does():
    """Fault F5: 200 overflows take torch's scale to 0 and its gradients to NaN; ours stays at its minimum."""
    stock = torch.amp.GradScaler("cpu")
    stock.scale(torch.tensor(1.0))
    ours = LossScaler(semantics="torch", max_skips=None)
    for _ in range(200):
        torch._amp_update_scale_(stock._scale, stock._growth_tracker, torch.tensor(1.0), 2.0, 0.5, 2000)
        ours.update(1.0)
    assert stock.get_scale() == 0.0
    assert ours.get_scale() == 1.0


# --- state ------------------------------------------------------------------------------------------------------


def advanced(semantics, trace, **settings_):
    scaler = LossScaler(semantics, growth_interval=5, max_skips=None, **settings_)
    for overflow in trace:
        scaler.update(float(overflow))
    return scaler


@settings(max_examples=60, deadline=None)
@given(
    semantics=st.sampled_from(SEMANTICS),
    trace=st.lists(st.booleans(), max_size=25),
    rest=st.lists(st.booleans(), max_size=25),
)
def test_a_resumed_scaler_continues_as_if_never_stopped(semantics, trace, rest):
    """A state saved within a growth interval as JSON and loaded into a new scaler gives the same scales and counts."""
    scaler = advanced(semantics, trace)
    resumed = advanced(semantics, [])
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    for overflow in rest:
        scaler.update(float(overflow))
        resumed.update(float(overflow))
        assert resumed.get_scale() == scaler.get_scale()
    assert resumed.state_dict() == scaler.state_dict()


@settings(max_examples=40, deadline=None)
@given(trace=st.lists(st.booleans(), max_size=25), rest=st.lists(st.booleans(), max_size=25))
def test_torch_continues_from_our_state_and_we_from_torchs(trace, rest):
    """Under torch's rule, either side continues the other's run within a growth interval."""
    ours, theirs = advanced("torch", trace), torch.amp.GradScaler("cpu", growth_interval=7)
    theirs.load_state_dict(ours.state_dict())
    back = LossScaler("torch", max_skips=None)
    back.load_state_dict(theirs.state_dict())
    theirs.scale(torch.tensor(1.0))
    for overflow in rest:
        flag = torch.tensor(float(overflow))
        args = (theirs._growth_factor, theirs._backoff_factor, theirs._growth_interval)
        torch._amp_update_scale_(theirs._scale, theirs._growth_tracker, flag, *args)
        ours.update(flag)
        back.update(flag)
        expected = max(theirs.get_scale(), 1.0)
        if expected != theirs.get_scale():
            return  # torch dropped below the minimum
        assert ours.get_scale() == back.get_scale() == expected


class DeepSpeedScaler:
    """A stand-in for the object that DeepSpeed pickles, with the attributes of its DynamicLossScaler."""

    def __init__(self, rule):
        self.cur_scale = rule.scale
        self.dynamic = True
        self.cur_iter = rule.cur_iter
        self.last_overflow_iter = rule.last_overflow_iter
        self.scale_factor = 2.0
        self.scale_window = rule.interval
        self.min_scale = 1
        self.delayed_shift = rule.full
        self.cur_hysteresis = rule.left
        self.consecutive_hysteresis = rule.consecutive
        self.raise_error_at_min_scale = True
        self.dtype = torch.float16


@settings(max_examples=60, deadline=None)
@given(
    semantics=st.sampled_from(["deepspeed", "deepspeed-consecutive"]),
    trace=st.lists(st.booleans(), max_size=25),
    rest=st.lists(st.booleans(), max_size=25),
    wrap=st.sampled_from(["dict", "object"]),
)
def test_deepspeed_state_is_continued_and_exported(semantics, trace, rest, wrap):
    """A DeepSpeed state continues under its own rule, and our export equals the state that DeepSpeed would have."""
    rule = RULES[semantics](65536.0, 2.0, 0.5, 5, 2, 1.0, 2.0**24)
    for overflow in trace:
        rule.update(overflow)
    source = DeepSpeedScaler(rule)
    ours = LossScaler(max_skips=None)
    ours.load_state_dict(vars(source) if wrap == "dict" else {"loss_scaler": source, "overflow": False})
    for overflow in rest:
        rule.update(overflow)
        ours.update(float(overflow))
        assert ours.get_scale() == rule.scale
    exported = ours.state_dict(layout="deepspeed")
    expected = vars(DeepSpeedScaler(rule))
    for key in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window", "delayed_shift", "cur_hysteresis",
                "consecutive_hysteresis", "scale_factor", "min_scale", "dynamic"):  # fmt: skip
        assert exported[key] == expected[key], key


def test_a_stage_0_deepspeed_state_is_loaded():
    """DeepSpeed without ZeRO writes fewer keys; the other settings are unchanged."""
    ours = LossScaler(growth_interval=500)
    ours.load_state_dict({
        "dynamic_loss_scale": True, "cur_scale": 256.0, "cur_iter": 40, "last_overflow_iter": 30,
        "scale_factor": 2.0, "scale_window": 20,
    })  # fmt: skip
    assert (ours.get_scale(), ours.settings.growth_interval, ours.settings.hysteresis) == (256.0, 20, 2)
    grown = next(i for i in range(30) if (ours.update(0.0), ours.get_scale())[1] > 256.0)
    assert grown == 20 - (40 - 30 - 1)  # DeepSpeed grows when cur_iter - last_overflow_iter - 1 reaches 20


def test_a_replaced_setting_is_reported(caplog):
    """Loading a state with other settings adopts them, as torch does, and logs a warning."""
    scaler = LossScaler("torch", growth_interval=10)
    scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert scaler.settings.growth_interval == 2000
    assert "growth_interval 10 -> 2000" in caplog.text


def test_a_collapsed_scale_is_raised_to_the_minimum_with_a_warning(caplog):
    """A torch state whose scale fell to 0 is usable again."""
    scaler = LossScaler("torch")
    scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict() | {"scale": 0.0})
    assert scaler.get_scale() == 1.0
    assert "outside" in caplog.text


def test_a_torch_scaler_keeps_its_own_rule_when_it_loads_a_deepspeed_state():
    """A scaler that does not follow DeepSpeed keeps the rule that the user chose, and torch's has no hysteresis."""
    scaler = LossScaler("torch", growth_interval=4)
    state = advanced("deepspeed", [1, 0, 0]).state_dict(layout="deepspeed")
    scaler.load_state_dict(state)
    assert (scaler.settings.semantics, scaler.settings.hysteresis) == ("torch", 1)
    megatron = LossScaler("megatron")
    megatron.load_state_dict(state)
    assert (megatron.settings.semantics, megatron.settings.hysteresis) == ("megatron", 2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "empty"),
        (None, "dictionary"),
        ({"scale": 1.0}, "has no growth_factor"),
        ({"cur_scale": math.nan}, "cur_scale=nan"),
        ({"cur_scale": 8.0, "cur_iter": -3}, "cur_iter=-3"),
        ({"cur_scale": 8.0, "dynamic": False}, "static"),
        (LossScaler().state_dict() | {"version": 99}, "Upgrade halfstep"),
        (LossScaler().state_dict() | {"scale": math.inf}, "scale=inf"),
        (LossScaler().state_dict() | {"_growth_tracker": 1.5}, "_growth_tracker=1.5"),
        (LossScaler().state_dict() | {"backoff_factor": 0.0}, "backoff_factor=0.0"),
        (NoScaler().state_dict(), "none loss scale"),
    ],
)
def test_an_invalid_state_is_rejected_and_changes_nothing(state, message):
    """An invalid state raises a HalfstepError that explains the problem, and the scaler is unchanged."""
    scaler = LossScaler(growth_interval=77)
    before = scaler.state_dict()
    with pytest.raises(HalfstepError, match=message):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


def test_static_scaler_state_round_trips(caplog):
    """A static state restores the counts, and another scale is reported."""
    source = StaticScaler(64.0)
    source.update(1.0)
    target = StaticScaler(32.0)
    target.load_state_dict(source.state_dict())
    assert (target.get_scale(), target.counts().skips) == (64.0, 1)
    assert "64.0" in caplog.text
    assert source.state_dict(layout="deepspeed") == {"cur_scale": 64.0, "dynamic": False}


def test_state_layouts_are_named():
    """torch's layout has its five keys; the error for an unknown layout lists the known ones."""
    scaler = LossScaler()
    assert set(scaler.state_dict(layout="torch")) == {
        "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker",
    }  # fmt: skip
    with pytest.raises(HalfstepError, match="halfstep, torch, deepspeed"):
        scaler.state_dict(layout="apex")


def test_unequal_factors_cannot_be_written_for_deepspeed():
    """DeepSpeed has a single factor, so exporting two different ones raises an error."""
    with pytest.raises(HalfstepError, match="one scale factor"):
        LossScaler(growth_factor=4.0).state_dict(layout="deepspeed")


def test_megatron_counters_export_to_deepspeeds_clean_steps():
    """Exported from another rule, DeepSpeed's counters give the clean steps counted so far."""
    exported = advanced("megatron", [1, 0, 0, 0]).state_dict(layout="deepspeed")
    assert exported["cur_iter"] - exported["last_overflow_iter"] - 1 == 3


def test_repr_shows_the_settings():
    """The repr of a scaler shows its settings."""
    assert repr(LossScaler("megatron")) == "LossScaler(dynamic(semantics=megatron))"


@pytest.mark.gpu
def test_update_on_a_gpu_does_not_wait_and_still_stops():
    """On a GPU nothing in update() synchronizes, and the stop comes at most one update late."""
    scaler = LossScaler(max_skips=3)
    scaler.update(torch.zeros((), device="cuda"))
    flag, loss = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    with no_synchronisation():
        scaler.update(flag)
        scaler.scale(loss)
    with pytest.raises(OverflowStop):
        for _ in range(5):
            scaler.update(torch.ones((), device="cuda"))
            torch.cuda.synchronize()
