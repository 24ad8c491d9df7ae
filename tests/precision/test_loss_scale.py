"""The settings of a loss scale: what is rejected, and that the text form holds everything."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import HalfstepError
from halfstep.precision.loss_scale import SEMANTICS, LossScale


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"backoff_factor": 0.0}, "backoff_factor=0.0"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
        ({"backoff_factor": -1.0}, "backoff_factor=-1.0"),
        ({"growth_factor": 1.0}, "growth_factor=1.0"),
        ({"growth_factor": 0.5}, "growth_factor=0.5"),
        ({"growth_factor": math.inf}, "growth_factor=inf"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"growth_interval": 2.5}, "growth_interval=2.5"),
        ({"hysteresis": 0}, "hysteresis=0"),
        ({"hysteresis": True}, "hysteresis=True"),
        ({"init_scale": 0.0}, "init_scale=0.0"),
        ({"init_scale": math.nan}, "init_scale=nan"),
        ({"init_scale": math.inf}, "init_scale=inf"),
        ({"init_scale": "big"}, "init_scale='big'"),
        ({"min_scale": 0.0}, "min_scale=0.0"),
        ({"min_scale": math.nan}, "min_scale=nan"),
        ({"init_scale": 0.5}, "below min_scale=1.0"),
        ({"init_scale": 2.0**25}, "above max_scale"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "above max_scale=2.0"),
        ({"max_skips": 0}, "max_skips=0"),
        ({"semantics": "tourch"}, "Did you mean 'torch'?"),
        ({"semantics": "torch", "hysteresis": 2}, "no effect under semantics='torch'"),
    ],
)
def test_impossible_settings_are_rejected_with_the_value_seen(given_settings, message):
    """Each impossible setting raises, and its message carries the value."""
    with pytest.raises(HalfstepError) as error:
        LossScale.dynamic(**given_settings)
    assert message in str(error.value)


def test_unknown_mode_is_rejected():
    """A mode that does not exist names those that do."""
    with pytest.raises(HalfstepError, match="none, static, dynamic"):
        LossScale(mode="dinamic")


@pytest.mark.parametrize(
    "text", ["", "dynamite", "dynamic(", "dynamic(hysteresis)", "dynamic(hysteresis=)", "dynamic(hysteresis=two)",
             "dynamic(hysterisis=2)", "dynamic(hysteresis=1;hysteresis=2)", "nan", "-1", "inf", "0"],
)  # fmt: skip
def test_text_that_means_nothing_is_rejected(text):
    """Malformed text raises a HalfstepError and nothing else."""
    with pytest.raises(HalfstepError):
        LossScale.parse(text)


positive = st.floats(2.0**-10, 2.0**30, allow_nan=False)


@given(
    semantics=st.sampled_from(SEMANTICS),
    borders=st.lists(positive, min_size=3, max_size=3),
    growth=st.floats(1.001, 100),
    backoff=st.floats(0.001, 0.999),
    interval=st.integers(1, 10**6),
    hysteresis=st.integers(1, 50),
    max_skips=st.none() | st.integers(1, 10**6),
)
def test_dynamic_text_form_parses_to_the_same_value(
    semantics, borders, growth, backoff, interval, hysteresis, max_skips
):
    """parse(str(x)) == x for every dynamic scale."""
    low, init, high = sorted(borders)
    value = LossScale.dynamic(
        semantics=semantics, init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval,
        hysteresis=1 if semantics == "torch" else hysteresis, min_scale=low, max_scale=high, max_skips=max_skips,
    )  # fmt: skip
    assert LossScale.parse(str(value)) == value


@given(st.floats(1e-6, 1e30))
def test_static_text_form_parses_to_the_same_value(scale):
    """parse(str(x)) == x for every static scale."""
    value = LossScale(mode="static", init_scale=scale)
    assert LossScale.parse(str(value)) == value


def test_plain_forms_are_short():
    """The usual settings print as one word."""
    assert [str(LossScale.parse(t)) for t in ("none", "dynamic", "128")] == ["none", "dynamic", "128"]
    assert str(LossScale.dynamic(semantics="torch")) == "dynamic(semantics=torch)"


@given(st.text(max_size=40))
def test_any_text_gives_a_value_or_a_halfstep_error(text):
    """No text makes the parser fail in another way."""
    with contextlib.suppress(HalfstepError):
        LossScale.parse(text)
