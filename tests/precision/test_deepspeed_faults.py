"""The table of DeepSpeed's faults: each row applies to its own releases and settings, and to no others."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.registry import all_rules
from halfstep.errors import SettingError
from halfstep.precision.deepspeed_faults import FAULTS, faults, version_range
from halfstep.precision.deepspeed_setup import Setup, parse_version, read_setup
from halfstep.precision.policy import Policy

ROOT = Path(__file__).resolve().parents[2]
BY_ID = {fault.id: fault for fault in FAULTS}
ON = {"enabled": True}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


def zero(stage, **more):
    """A configuration at a ZeRO stage."""
    return {"zero_optimization": {"stage": stage}} | more


# id, a configuration that has it, one that differs in a single setting and does not, and what is not in the configuration
CASES = [
    ("D05", zero(1, fp16=ON | {"hysteresis": 0}), zero(1, fp16=ON | {"hysteresis": 1}), {}),
    ("D06", zero(1, fp16=ON | {"initial_scale_power": 4, "min_loss_scale": 1024}), zero(1, fp16=ON), {}),
    ("D07", zero(2, fp16=ON | {"initial_scale_power": 32}), zero(2, fp16=ON | {"initial_scale_power": 24}), {}),
    ("D08", zero(0, fp16=ON | {"hysteresis": 4}), zero(0, fp16=ON), {}),
    ("D09", zero(1, fp16=ON), zero(1, fp16=ON | {"loss_scale": 128}), {}),
    ("D10", zero(0, fp16=ON), zero(1, fp16=ON), {}),
    ("D11", {"fp16": ON}, zero(1, fp16=ON), {}),
    ("D12", zero(3, fp16=ON), zero(3, bf16=ON), {}),
    ("D13", zero(1, fp16=ON | {"loss_scale": 8}), zero(1, fp16=ON), {}),
    ("D14", zero(1, fp16=ON), zero(1, fp16=ON | {"loss_scale": 8}), {}),
    ("D15", {"fp16": ON}, zero(1, fp16=ON), {}),
    ("D16", {"bf16": ON}, zero(1, bf16=ON), {}),
    ("D17", {"fp16": ON}, zero(1, fp16=ON), {}),
    ("D18", {"fp16": ON}, {"fp16": ON, "gradient_clipping": 0}, {"experts": True}),
    ("D19", {"gradient_clipping": 1.0}, {"gradient_clipping": 0.0}, {"experts": True}),
    ("D20", {"bf16": ON}, {"bf16": ON, "gradient_clipping": 0}, {"experts": True, "fused": True}),
    ("D21", {"bf16": ON}, zero(1, bf16=ON), {"fused": True}),
    ("D22", zero(3, bf16=ON), zero(3, bf16=ON | {"check_grad_overflow": False}), {}),
    ("D23", zero(1, bf16=ON, data_types={"grad_accum_dtype": "fp32"}), zero(1, bf16=ON), {}),
    ("D24", zero(2, bf16=ON), zero(2), {}),
    ("D25", {}, zero(1), {}),
    ("D36", zero(1, bf16=ON, gradient_accumulation_steps=8), zero(1, bf16=ON), {}),
    ("D37", zero(1, data_types={"grad_accum_dtype": "bf16"}), zero(1), {}),
    ("D38", zero(1, bf16=ON, data_types={"grad_accum_dtype": "fp32"}), zero(2, bf16=ON, data_types={"grad_accum_dtype": "fp32"}), {}),
    ("D39", zero(1, bf16=ON, data_types={"grad_accum_dtype": "fp16"}), zero(1, bf16=ON), {}),
    ("D40", zero(1, bf16=ON), zero(1, bf16=ON, communication_data_type="fp32"), {}),
    ("D41", zero(1, bf16=ON, communication_data_type="fp16"), zero(1, fp16=ON, communication_data_type="fp16"), {}),
    ("D61", {"torch_autocast": ON}, AUTOCAST, {}),
    ("D62", zero(1, **AUTOCAST), zero(1, gradient_clipping=0.0, **AUTOCAST), {}),
    ("D63", zero(2, **AUTOCAST), AUTOCAST, {}),
    ("D64", zero(2, **AUTOCAST), AUTOCAST, {"num_groups": 2}),
    ("D65", AUTOCAST, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}),
    ("D66", zero(1, fp16=ON, **AUTOCAST), zero(1, fp16=ON), {}),
    ("D83", zero(1, fp16=ON, gradient_clipping=0), zero(1, gradient_clipping=0), {}),
]  # fmt: skip


def ids(version, config, **more):
    """The ids of the faults of a configuration."""
    return {fault.id for fault in faults(version, config, **more)}


@pytest.mark.parametrize(("fault", "config", "other", "more"), CASES, ids=[case[0] for case in CASES])
def test_fault_applies_to_its_own_settings(fault, config, other, more):
    """Each fault is reported for a configuration that has it, and not for one without the setting it needs."""
    affected = "0.19.7"  # every row of the table is in this release
    assert fault in ids(affected, config, **more)
    assert fault not in ids(affected, other, **more)


def test_every_fault_has_a_case():
    """The table has the rows D05-D25, D36-D41, D61-D66 and D83, once each and in order, each with a case."""
    expected = [*range(5, 26), *range(36, 42), *range(61, 67), 83]
    assert [fault.id for fault in FAULTS] == [f"D{number:02}" for number in expected]
    assert [case[0] for case in CASES] == [fault.id for fault in FAULTS]


@pytest.mark.parametrize(
    ("fault", "config", "first", "fixed"),
    [
        ("D11", {"fp16": ON}, "0.18.3", None),
        ("D22", zero(3, bf16=ON), None, "0.19.8"),
        ("D24", zero(1, bf16=ON), None, "0.19.8"),
        ("D12", zero(1, fp16=ON), None, None),
    ],
)
def test_fault_applies_to_its_own_releases(fault, config, first, fixed):
    """A fault starts with the first release that has it and ends before the first that does not."""
    for version in ("0.18.2", "0.18.3", "0.19.7", "0.19.8", "0.20.0"):
        numbers = parse_version(version)
        affected = (first is None or numbers >= parse_version(first)) and (
            fixed is None or numbers < parse_version(fixed)
        )
        assert (fault in ids(version, config)) == affected, version


def test_clipping_is_on_by_default_since_0_19_3():
    """A configuration without gradient_clipping clips from 0.19.3 on, and has the faults of clipping from then on."""
    assert "D62" not in ids("0.19.2", zero(1, **AUTOCAST))
    assert "D62" in ids("0.19.3", zero(1, **AUTOCAST))


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-lean", "fp16-lean"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_written_configuration_avoids_what_it_can(name, accumulate, stage):
    """No configuration of Policy.to_deepspeed has a fault that Halfstep avoids by settings or rejects."""
    config = Policy.parse(name).to_deepspeed(stage=stage, accumulate=accumulate, max_norm=1.0)
    assert not [fault.id for fault in faults("0.19.8", config) if fault.action != "own"]


def test_driven_configuration_leaves_only_what_needs_a_bare_backward():
    """Where Halfstep drives, the faults of DeepSpeed's scaler, sums and clipping cannot occur in any preset."""
    assert ids("0.19.8", Policy.parse("fp16-lean").to_deepspeed(stage=2, accumulate=8, driver="halfstep")) == {
        "D13",
        "D83",
    }
    assert ids("0.19.8", Policy.parse("fp16").to_deepspeed(stage=2, max_norm=1.0, driver="halfstep")) == set()


def test_remedies_name_rules_that_exist():
    """A rule code in a remedy is the code of a rule."""
    codes = {code for fault in FAULTS for code in re.findall(r"HS\d+", fault.remedy)}
    assert codes
    assert codes <= {rule.code for rule in all_rules()}


def test_docs_have_every_row():
    """docs/deepspeed.md has each fault with its releases, consequence and remedy."""
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    for fault in FAULTS:
        row = f"| {fault.id} | {fault.when} | {version_range(fault)} | {fault.consequence} | {fault.action}: {fault.remedy} |"
        assert row in page, fault.id


def test_faults_read_well():
    """A fault prints its id, condition, consequence and remedy in one line."""
    text = str(BY_ID["D12"])
    assert text.startswith("D12 (dynamic fp16, on the step where the scale grows): ")
    assert "\n" not in text
    assert not [fault.id for fault in FAULTS if fault.consequence.endswith(".") or fault.remedy.endswith(".")]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.19.8", (0, 19, 8)), ("0.19.8+cpu", (0, 19, 8)), ("0.20", (0, 20)), ((0, 18, 2), (0, 18, 2))],
)
def test_versions_are_read(text, numbers):
    """A version is text or numbers; a local part does not matter."""
    assert parse_version(text) == numbers


def test_what_is_no_version_is_rejected():
    """Text without numbers is rejected."""
    with pytest.raises(SettingError, match="is not a version"):
        parse_version("latest")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.sampled_from(["auto", "fp16", "true", "cpu"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["enabled", "stage", "device", "dtype"]), inner)
    ),
    max_leaves=4,
)
keys = st.sampled_from([
    "fp16", "bf16", "bfloat16", "torch_autocast", "zero_optimization", "data_types", "gradient_clipping",
    "communication_data_type", "gradient_accumulation_steps",
])  # fmt: skip


@given(st.dictionaries(keys, values))
def test_any_configuration_has_a_setup(config):
    """Whatever another program passed to DeepSpeed can be described."""
    assert isinstance(read_setup(config, (0, 19, 8)), Setup)
    faults("0.19.8", config)
