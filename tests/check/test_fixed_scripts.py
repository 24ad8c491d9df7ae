"""Wrong scripts are fixed, checked again and run: on the CPU, with an active scaler, next to their wrong form."""

import pytest

from fix_runs import fix_text, run, same_with_and_without_scaling
from wrong_scripts import WRONG


@pytest.mark.parametrize(("codes", "text"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_fixed_script_runs_and_is_cured(codes, text):
    """`--fix` cures what it promises, causes no finding, and the script runs; one that it cannot cure still runs."""
    done = fix_text(text)
    assert codes <= set(done.applied)
    # Nothing is silenced; an inserted `unscale_` (HS104) also records the checks that an early `update()` needs (HS115).
    cured = {"HS115"} if "HS104" in done.applied else set()
    assert set(done.before) - set(done.applied) - cured == set(done.after) - cured
    run(done.text)
    if codes & {"HS101", "HS102", "HS104"}:
        assert same_with_and_without_scaling(done.text)


@pytest.mark.slow
@pytest.mark.parametrize("text", [text for name, _, text in WRONG], ids=[row[0] for row in WRONG])
def test_unsafe_fixes_do_not_break_these_scripts_either(text):
    """With `--unsafe-fixes` the scripts run as well."""
    done = fix_text(text, unsafe=True)
    if done.applied:
        run(done.text)


def script(name):
    return next(text for row, _, text in WRONG if row == name)


@pytest.mark.parametrize("name", ["clip_in_a_plain_loop", "clip_of_two_optimizers_together", "clip_each_parameter"])
def test_the_wrong_script_trains_something_else(name):
    """The comparison with a disabled scaler detects the mistake: a clip of scaled gradients changes the weights."""
    assert not same_with_and_without_scaling(script(name))


def test_each_clip_is_unscaled_once_by_its_own_optimizer():
    """Two clips of one optimizer share an unscale_, and two optimizers have one each."""
    assert fix_text(script("clip_under_if_then_another")).text.count("unscale_(") == 1
    done = fix_text(script("clip_of_two_optimizers_together")).text
    assert "scaler.unscale_(optG)\n    nn.utils.clip_grad_norm_(netG" in done
    assert "scaler.unscale_(optD)\n    nn.utils.clip_grad_norm_(netD" in done


def test_an_optional_scaler_is_unscaled_under_its_own_condition():
    """The condition of the step is repeated, with the script's indentation."""
    done = fix_text(script("clip_with_tabs_and_an_optional_scaler")).text
    assert "\t\tif scaler is not None:\n\t\t\tscaler.unscale_(optimizer)\n\t\tclip_grad_norm_" in done


def test_a_fixed_checkpoint_restores_the_scale():
    """The resumed run continues with the saved scale, not the initial one."""
    text = script("checkpoint_of_a_script").replace("epoch in range(2)", "epoch in (1,)")
    saved = "import io, torch\nscaler = torch.amp.GradScaler('cuda', init_scale=2.0)\nscaler.scale(torch.ones(1))\n"
    done = fix_text(text).text
    start = done.index("path.seek(0)")
    checkpoint = '{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {**scaler.state_dict(), "scale": 2.0}}'
    head, rest = done[:start], done[start:]
    variables = run(f"{saved}{head}torch.save({checkpoint}, path)\n        {rest}")
    assert variables["scaler"].get_scale() == 2.0


def test_windows_line_endings_stay():
    """Each line of a CRLF file still ends with CRLF."""
    done = fix_text(script("clip_with_windows_line_endings")).text
    assert done.count("\n") == done.count("\r\n")
