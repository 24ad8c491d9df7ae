"""GPU memory: written sizes, names, and the usable part."""

import pytest

from halfstep.errors import SettingError
from halfstep.planning import capacity
from halfstep.planning.capacity import capacity_of, parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("24 GB", 24 * 10**9), ("40", 40 << 30), ("1.5g", 3 << 29), ("900MiB", 900 << 20)],
)
def test_memory_is_parsed(text, size):
    """Sizes are parsed with the usual units; a bare number is GiB."""
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "80 apples", "-3GiB", "100MiB"])
def test_invalid_memory_is_rejected(text):
    """An invalid size, or one that leaves nothing for tensors, raises with an example."""
    with pytest.raises(SettingError, match="--memory"):
        parse_memory(text)


def test_usable_memory_is_less_than_the_total():
    """The usable memory of a named GPU is what its driver reports, less context and fragmentation."""
    h200 = capacity_of("H200", None)
    assert h200.total_bytes == 143771 << 20
    assert h200.usable_bytes < h200.total_bytes - h200.context_bytes


def test_gpu_without_a_known_size_asks_for_memory():
    """An architecture has no memory size, and the error names the option to add."""
    with pytest.raises(SettingError, match="--memory"):
        capacity_of("sm90", None)


def test_memory_overrides_the_name():
    """--memory replaces the named GPU's size."""
    assert capacity_of("A100", "10GiB").total_bytes == 10 << 30


def test_ambiguous_name_has_a_note():
    """A name that means several GPUs has a note that names the one that was chosen."""
    assert any("80GB" in note for note in capacity_of("A100", None).notes)


def test_machine_without_gpu_has_no_size(monkeypatch):
    """Without a GPU on this machine or a name, there is no size to plan for."""
    cpu = capacity.find_gpu("A100")
    monkeypatch.setattr(capacity, "probe", lambda: type(cpu)("a CPU", "cpu", "x86", "CPU", cpu.support))
    assert capacity_of(None, None) is None


@pytest.mark.parametrize(("gpu", "memory"), [("MI300X", None), ("Arc A770", None), ("M2", "16GiB")])
def test_gpus_of_other_vendors_have_a_note(gpu, memory):
    """Only a plan for a GPU of another vendor has the note that its peaks follow CUDA's rules."""
    assert any("follow CUDA's rules" in note for note in capacity_of(gpu, memory).notes)
    assert not any(
        "follow CUDA's rules" in n for name in ("T4", "Something 9000") for n in capacity_of(name, "16GiB").notes
    )


def test_reason_for_an_unknown_size_concerns_memory():
    """The error for an unknown size quotes only notes about memory."""
    with pytest.raises(SettingError, match=r"unknown \(It[^;)]*memory[^;)]*CPU\); add --memory"):
        capacity_of("M2", None)
