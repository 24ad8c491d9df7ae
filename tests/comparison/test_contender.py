"""Rows of a comparison, from what people type."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.comparison.contender import PEERS, Contender, parse_contenders
from halfstep.errors import SettingError
from halfstep.precision.policy import PRESETS


@pytest.mark.parametrize(
    ("text", "label", "policy", "compiled"),
    [
        ("bf16", "bf16", "bf16", False),
        ("bf16-lean,states=8bit,compile=on", "bf16-lean,states=8bit,compile=on", "bf16-lean,states=8bit", True),
        ("compile=on,bf16", "bf16,compile=on", "bf16", True),
        ("fp16,compile=off", "fp16", "fp16", False),
        ("bf16,compile=default", "bf16,compile=on", "bf16", True),
        ("bf16,compile=reduce-overhead", "bf16,compile=reduce-overhead", "bf16", "reduce-overhead"),
        ("BF16-mixed", "bf16", "bf16", False),
        ("fp16,compile=on,loss_scale=128", "fp16,loss_scale=128,compile=on", "fp16,loss_scale=128", True),
    ],
)
def test_compile_is_taken_off_before_the_policy_is_read(text, label, policy, compiled):
    """A row keeps the policy's own spelling, and says compile=on once, at its end."""
    (row,) = parse_contenders([text])
    assert (row.label, row.policy, row.compile) == (label, policy, compiled)


@given(st.sampled_from(sorted(set(PRESETS) - {"fp8"})), st.booleans())
def test_a_label_parses_to_the_same_row(preset, compiled):
    """What a row is called is what can be typed for it."""
    (row,) = parse_contenders([f"{preset},compile={'on' if compiled else 'off'}"])
    assert parse_contenders([row.label]) == (row,)


@given(st.sampled_from(PEERS), st.sampled_from(["", ":fp16", ":fp32", ":bf16"]), st.booleans())
def test_a_peer_label_parses_to_the_same_row(peer, form, compiled):
    """Peers too; bf16 is what a peer runs unless it says otherwise."""
    (row,) = parse_contenders([], [f"{peer}{form}{',compile=on' if compiled else ''}"])
    assert parse_contenders([], [row.label]) == (row,)
    assert row.compute == (form.removeprefix(":") or "bf16")
    assert row.keeps_master


@pytest.mark.parametrize(
    ("precisions", "peers", "message"),
    [
        ([], [], "nothing to compare"),
        (["bf16", "bf16-mixed"], [], "given twice"),
        (["bf61"], [], "Did you mean 'bf16'"),
        (
            ["bf16,compile=maybe"],
            [],
            "compile='maybe' is neither on nor off, nor a mode of torch.compile: default, reduce",
        ),
        (["bf16,compile"], [], "compile='' is neither on nor off"),
        (["bf16,compile=on,compile=on"], [], "gives 'compile' twice"),
        (["auto"], [], "halfstep probe"),
        (["torch-amp"], [], "--peer torch-amp"),
        ([16], [], "is text"),
        (["fp32"], ["torch_amp"], "Did you mean 'torch-amp'"),
        (["fp32"], ["torch-amp:fp8"], "bf16, fp16, fp32"),
    ],
)
def test_mistakes_are_named(precisions, peers, message):
    """Each says what was seen and what to write."""
    with pytest.raises(SettingError, match=message):
        parse_contenders(precisions, peers)


def test_a_row_without_a_master_says_so():
    """The verdict has to know."""
    assert not parse_contenders(["bf16-lean,master=none"])[0].keeps_master
    assert Contender.from_dict({"label": "bf16", "policy": "bf16", "notes": []}) == Contender("bf16", "bf16")
