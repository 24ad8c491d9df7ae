"""Public training loops, converted as a user would convert them, against the same loops under plain torch AMP.

`tests/loops` has the pairs: `plain_NAME(preset)` is the loop with torch.autocast and torch.amp.GradScaler,
`converted_NAME(precision)` the one with the Engine. Both return the losses of 20 steps. The models are small and have the
structure of the originals; no code of theirs is copied.
"""

import functools

import pytest

from loops import control, generative, language, methods, vision
from loops.amp import PRESETS, TOLERANCES, precision_of

MODULES = (language, vision, generative, control, methods)
PLAIN = {n.removeprefix("plain_"): f for m in MODULES for n, f in vars(m).items() if n.startswith("plain_")}
CONVERTED = {n.removeprefix("converted_"): f for m in MODULES for n, f in vars(m).items() if n.startswith("converted_")}
QUICK = ("mingpt", "dcgan", "ppo", "sam")


@functools.cache
def reference(name, preset):
    """The losses of a plain loop; a lean preset is compared with AMP in its compute format."""
    return PLAIN[name](preset)


def deviation(losses, expected):
    """The largest relative difference. Where a loss crosses zero it is relative to a tenth of the largest one."""
    largest = max(abs(value) for value in expected)
    pairs = zip(losses, expected, strict=True)
    return max(abs(a - b) / max(abs(b), largest / 10) for a, b in pairs)


def compare(name, preset):
    losses = CONVERTED[name](precision_of(preset))
    assert deviation(losses, reference(name, preset.removesuffix("-lean"))) <= TOLERANCES[preset]


def test_every_plain_loop_has_its_conversion():
    """Plain and converted loops come in pairs, and there are at least 15 of them."""
    assert PLAIN.keys() == CONVERTED.keys()
    assert len(CONVERTED) >= 15


@pytest.mark.parametrize("preset", ["fp32", "bf16-lean"])
@pytest.mark.parametrize("name", QUICK)
def test_a_converted_loop_has_the_losses_of_torch_amp(name, preset):
    """Over 20 steps the losses of a converted loop are those of torch AMP, to 1e-3, or to 2e-2 in a lean preset."""
    compare(name, preset)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", CONVERTED)
def test_every_converted_loop_has_the_losses_of_torch_amp(name, preset):
    """The same for every loop and preset."""
    compare(name, preset)
