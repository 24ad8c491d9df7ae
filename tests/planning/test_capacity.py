"""GPU memory: sizes people write, names, and what is left of them."""

import pytest

from halfstep.errors import SettingError
from halfstep.planning import capacity
from halfstep.planning.capacity import capacity_of, parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("24 GB", 24 * 10**9), ("40", 40 << 30), ("1.5g", 3 << 29), ("900MiB", 900 << 20)],
)
def test_memory_is_read(text, size):
    """Sizes are read with the units people write; a bare number is GiB."""
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "80 apples", "-3GiB", "100MiB"])
def test_bad_memory_is_refused(text):
    """What is no size, or leaves nothing for tensors, is refused with an example."""
    with pytest.raises(SettingError, match="--memory"):
        parse_memory(text)


def test_named_gpu_has_less_than_its_number():
    """A named GPU has what its driver reports, less the context and what fragments."""
    found = capacity_of("H200", None)
    assert found.total_bytes == 143771 << 20
    assert found.usable_bytes < found.total_bytes - found.context_bytes


def test_gpu_without_a_known_size_asks_for_memory():
    """An architecture has no memory size, and the error says what to give."""
    with pytest.raises(SettingError, match="--memory"):
        capacity_of("sm90", None)


def test_given_memory_wins_over_the_name():
    """--memory replaces the named GPU's size."""
    assert capacity_of("A100", "10GiB").total_bytes == 10 << 30


def test_ambiguous_name_is_told():
    """A name that means several cards carries the note that says which was taken."""
    assert any("80GB" in note for note in capacity_of("A100", None).notes)


def test_machine_without_gpu_has_no_size(monkeypatch):
    """Without a GPU here and none named, there is no size to plan for."""
    cpu = capacity.find_gpu("A100")
    monkeypatch.setattr(capacity, "probe", lambda: type(cpu)("a CPU", "cpu", "x86", "CPU", cpu.support))
    assert capacity_of(None, None) is None


@pytest.mark.parametrize(("gpu", "memory"), [("MI300X", None), ("Arc A770", None), ("M2", "16GiB")])
def test_gpus_the_rules_were_not_made_for_are_told(gpu, memory):
    """A plan for another maker's GPU says that its peaks are CUDA's; one for NVIDIA's, or of unknown make, does not."""
    assert any("those of CUDA" in note for note in capacity_of(gpu, memory).notes)
    assert not any("those of CUDA" in n for name in ("T4", "Something 9000") for n in capacity_of(name, "16GiB").notes)


def test_shared_memory_is_the_reason_that_is_given():
    """Where a size is asked for, only what concerns memory is said."""
    with pytest.raises(SettingError, match=r"not known \(Its memory is the machine's own, shared with the CPU\); give"):
        capacity_of("M2", None)
