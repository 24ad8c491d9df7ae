"""Rows of a comparison, parsed from the command line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.comparison.variant import BASELINES, Variant, parse_variants
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
    """A label is the normalized policy, with compile=on at its end."""
    (row,) = parse_variants([text])
    assert (row.label, row.policy, row.compile) == (label, policy, compiled)


@given(st.sampled_from(sorted(set(PRESETS) - {"fp8"})), st.booleans())
def test_a_label_parses_to_the_same_row(preset, compiled):
    """The label of a row can be used to request it."""
    (row,) = parse_variants([f"{preset},compile={'on' if compiled else 'off'}"])
    assert parse_variants([row.label]) == (row,)


@given(st.sampled_from(BASELINES), st.sampled_from(["", ":fp16", ":fp32", ":bf16"]), st.booleans())
def test_a_baseline_label_parses_to_the_same_row(baseline, form, compiled):
    """The same is true for baselines, whose default format is bf16."""
    (row,) = parse_variants([], [f"{baseline}{form}{',compile=on' if compiled else ''}"])
    assert parse_variants([], [row.label]) == (row,)
    assert row.compute == (form.removeprefix(":") or "bf16")
    assert row.has_fp32_master


@pytest.mark.parametrize(
    ("precisions", "peers", "message"),
    [
        ([], [], "nothing to compare"),
        (["bf16", "bf16-mixed"], [], "given twice"),
        (["bf61"], [], "Did you mean 'bf16'"),
        (
            ["bf16,compile=maybe"],
            [],
            "compile='maybe' is neither on nor off, nor 'blocks', nor a mode of torch.compile: default",
        ),
        (["bf16,compile"], [], "compile='' is neither on nor off"),
        (["bf16,compile=on,compile=on"], [], "sets 'compile' twice"),
        (["auto"], [], "halfstep probe"),
        (["torch-amp"], [], "--peer torch-amp"),
        ([16], [], "is a string"),
        (["fp32"], ["torch_amp"], "Did you mean 'torch-amp'"),
        (["fp32"], ["torch-amp:fp8"], "bf16, fp16, fp32"),
    ],
)
def test_mistakes_are_named(precisions, peers, message):
    """Each error has the wrong value and what to write instead."""
    with pytest.raises(SettingError, match=message):
        parse_variants(precisions, peers)


def test_a_variant_without_master_weights_is_known():
    """The verdict does not recommend it."""
    assert not parse_variants(["bf16-lean,master=none"])[0].has_fp32_master


def test_only_plain_fp32_is_a_reference():
    """Neither a compiled nor a baseline's fp32 is the reference."""
    variants = parse_variants(["fp32", "fp32,compile=on", "bf16"], ["torch-amp:fp32"])
    assert [variant.is_plain_fp32 for variant in variants] == [True, False, False, False]


def test_a_variant_is_stored_under_its_keys():
    """The keys are a file format; a file without the optional ones can be read."""
    (variant,) = parse_variants([], ["torch-amp:fp16,compile=on"])
    assert variant.as_dict() == {
        "label": "torch-amp:fp16,compile=on", "policy": "fp16", "compile": True, "peer": "torch-amp", "notes": [],
    }  # fmt: skip
    assert Variant.from_dict(variant.as_dict()) == variant
    assert Variant.from_dict({"label": "bf16", "policy": "bf16", "notes": []}) == Variant("bf16", "bf16")


def test_a_compiled_row_knows_its_form_without_compilation():
    """It has the same loop and policy; modes of torch.compile do not matter."""
    plain, compiled, mode, lean, peer = parse_variants(
        ["bf16", "bf16,compile=on", "bf16,compile=reduce-overhead", "bf16-lean"], ["torch-amp,compile=on"]
    )
    assert compiled.is_compiled_form_of(plain)
    assert mode.is_compiled_form_of(plain)
    for one, other in ((plain, compiled), (plain, plain), (mode, compiled), (compiled, lean), (peer, plain)):
        assert not one.is_compiled_form_of(other)
