"""How much of a GPU's memory a training step can use: names, sizes, and what is gone before it starts.

A card's number is not what torch gets: the driver keeps a part, the CUDA context and its kernels another, and the
caching allocator cannot use every gap. Each is a line of its own, with its uncertainty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfstep.errors import SettingError
from halfstep.hardware.probe import Hardware, find_gpu, probe

__all__ = ["Capacity", "capacity_of", "parse_memory"]

# What nvidia-smi shows as total, in MiB, where it is known; elsewhere the vendor's number less 2 %.
_TOTAL_MIB = {
    "V100 16GB": 16160, "V100 32GB": 32510, "T4": 15360, "A100 40GB": 40960, "A100 80GB": 81920, "A10G": 23028, "A10": 23028,
    "L4": 23034, "L40S": 46068, "RTX 3090": 24576, "RTX 4090": 24564, "H100 SXM": 81559, "H100 PCIe": 81559, "H200": 143771,
}  # fmt: skip
_VENDOR_SHARE = 0.98
# The CUDA context with torch's kernels loaded: 0.4 to 0.7 GiB on recent cards and drivers; not measured per card.
CONTEXT_BYTES = 600 << 20
# Gaps that no request fits. The allocator gives whole cached segments back before it fails, so only a part is lost.
FRAGMENTATION = 0.03
_UNITS = {
    "": 2**30,
    "g": 2**30,
    "gib": 2**30,
    "gb": 10**9,
    "m": 2**20,
    "mib": 2**20,
    "mb": 10**6,
    "t": 2**40,
    "tib": 2**40,
}


@dataclass(frozen=True)
class Capacity:
    """A GPU's memory and what of it a step's tensors can take."""

    name: str
    total_bytes: int
    context_bytes: int = CONTEXT_BYTES
    fragmentation: float = FRAGMENTATION
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """The most that `max_memory_allocated` may be."""
        return int((self.total_bytes - self.context_bytes) / (1 + self.fragmentation))


def parse_memory(text: str) -> int:
    """Bytes of "80GiB", "24 GB" or "40" (GiB)."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found.group(2).casefold() not in _UNITS:
        raise SettingError(f"--memory {text!r} is no size; write 80GiB, 24GB or 40 (GiB).")
    size = int(float(found.group(1)) * _UNITS[found.group(2).casefold()])
    if size <= CONTEXT_BYTES:
        raise SettingError(f"--memory {text!r} leaves nothing beside the CUDA context of {CONTEXT_BYTES >> 20} MiB.")
    return size


def capacity_of(gpu: str | None, memory: str | int | None) -> Capacity | None:
    """The memory to plan for: the size given, the named GPU's, or this machine's; None if no size is known."""
    if memory is not None:
        size = memory if isinstance(memory, int) else parse_memory(memory)
        try:
            notes = _beyond_cuda(find_gpu(gpu)) if gpu else ()
        except SettingError:  # a card that is not in the table is planned by its memory
            notes = ()
        return Capacity(gpu or "the given memory", size, source="as given", notes=notes)
    if gpu is not None:
        return _of_hardware(find_gpu(gpu), gpu)
    here = probe()
    if here.kind == "cpu" or here.memory_bytes is None:
        return None
    return Capacity(
        here.name, here.memory_bytes, source="this machine's, as torch reports it", notes=_beyond_cuda(here)
    )


def _beyond_cuda(found: Hardware) -> tuple[str, ...]:
    """What to say of a GPU that the prediction's rules were not made for."""
    if found.kind in {"cuda", "cpu"}:
        return ()
    return (
        f"The rules behind the peaks are those of CUDA, and none was measured on {found.name}: weights, gradients and states are exact "
        "there too, but kernels, workspaces and the allocator differ. Leave room.",
    )


def _of_hardware(found: Hardware, asked: str) -> Capacity | None:
    if found.memory_bytes is None:
        said = "; ".join(note.rstrip(".") for note in found.notes if "memory" in note)
        raise SettingError(
            f"The memory of {asked!r} is not known ({said or 'it comes in several sizes'}); give --memory 80GiB."
        )
    notes = tuple(note for note in found.notes if "taken as" in note or "as you wrote it" in note or "die" in note)
    notes += _beyond_cuda(found)
    name = found.name.removeprefix(f"{found.vendor} ")
    known = _TOTAL_MIB.get(name)
    if known is not None and abs(known * 2**20 / found.memory_bytes - 1) < 0.1:
        return Capacity(found.name, known << 20, source="what its driver reports", notes=notes)
    return Capacity(
        found.name, int(found.memory_bytes * _VENDOR_SHARE), source="the vendor's number less 2 %", notes=notes
    )
