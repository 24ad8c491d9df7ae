import dataclasses

import pytest

from halfstep.hardware.devices import ARCHITECTURES, DEVICES, FORMAT_NAMES, Fact, Facts, find_devices, parse_name

REQUIRED = {
    "sm60", "sm61", "sm70", "sm75", "sm75-no-tensor", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120",
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "apple-m1", "apple-m2", "xpu-max", "xpu-xmx", "xpu-plain",
    "x86", "x86-avx512-bf16", "x86-avx512-bf16-fp16", "x86-amx-bf16", "x86-amx-fp16", "arm", "arm-fp16", "arm-bf16",
    "arm-bf16-fp16",
}  # fmt: skip


def test_the_table_has_every_architecture_promised():
    """No architecture that the documentation names is missing."""
    assert set(ARCHITECTURES) >= REQUIRED


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_every_architecture_says_why(arch):
    """Whatever is not plain fp32 carries a reason, and the words are those four."""
    assert set(arch.facts) == set(FORMAT_NAMES)
    assert set(arch.facts.values()) <= {"native", "slow", "emulated", "none"}
    assert arch.facts["fp32"] == "native"
    for name in set(FORMAT_NAMES) - {"fp32"}:
        assert arch.facts.why(name), name


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_every_device_is_found_by_its_names_alone(device):
    """A listed name means that device first, and its architecture exists."""
    assert device.arch in ARCHITECTURES
    for name in (device.name, *device.aliases):
        assert find_devices(name)[0] == device, name


def test_names_are_unique():
    """No two products share a name."""
    names = [name for d in DEVICES for name in (d.name, *d.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "core", "form", "memory_gb"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100", "sxm", 80),
        ("a100 80 gb", "a100", "", 80),
        ("Tesla V100-PCIE-32GB", "v100", "pcie", 32),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper", "", None),
        ("Intel(R) Arc(TM) A770 Graphics", "arca770", "", None),
        ("AMD Instinct MI300X OAM", "mi300x", "", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100", "sxm", 40),
        ("Apple M1 Max", "m1max", "", None),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", "rtx2080withdesign", "", None),
    ],
)
def test_full_device_names_are_taken_apart(name, core, form, memory_gb):
    """Vendor words and separators do not matter; product, form and memory do."""
    parsed = parse_name(name)
    assert (parsed.core, parsed.form, parsed.memory_gb) == (core, form, memory_gb)


def test_facts_are_a_frozen_mapping():
    """Facts can be hashed and compared, and refuse formats and writes they do not have."""
    facts = Facts(bf16=Fact("native", "because"))
    assert facts == Facts(bf16=Fact("native", "because"))
    assert len({facts, Facts()}) == 2
    assert dict(facts) == {"fp32": "native", "tf32": "none", "bf16": "native", "fp16": "none", "fp8": "none"}
    assert len(facts) == 5
    assert facts.get("int8") is None
    with pytest.raises(KeyError):
        facts["why"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.bf16 = Fact("none")


def test_the_flush_to_zero_of_mi250_is_said():
    """The one caveat that changes what fp16 can hold is in the table."""
    assert "subnormals to zero" in ARCHITECTURES["gfx90a"].caveats[0]


def test_no_speeds_are_written():
    """The table holds facts, not numbers that nobody here measured."""
    text = str(ARCHITECTURES) + str(DEVICES)
    assert "FLOP" not in text
