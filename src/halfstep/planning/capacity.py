"""How much of a GPU's memory a training step can use: names, sizes, and what is lost before it starts.

torch does not get a GPU's nominal memory: the driver reserves a part, the CUDA context with its kernels needs another,
and the caching allocator cannot use every gap. Each is reported separately, with its uncertainty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfstep.errors import SettingError
from halfstep.hardware.probe import Hardware, find_gpu, probe
from halfstep.hardware.units import bytes_text

__all__ = ["Capacity", "capacity_of", "parse_memory"]

# The total that nvidia-smi shows, in MiB, where it is known; otherwise the vendor's number less 2 %.
_TOTAL_MIB = {
    "V100 16GB": 16160, "V100 32GB": 32510, "T4": 15360, "A100 40GB": 40960, "A100 80GB": 81920, "A10G": 23028, "A10": 23028,
    "L4": 23034, "L40S": 46068, "RTX 3090": 24576, "RTX 4090": 24564, "H100 SXM": 81559, "H100 PCIe": 81559, "H200": 143771,
}  # fmt: skip
_VENDOR_SHARE = 0.98
_ABOUT_SIZE = ("may also mean", "the table has", "die")  # in the notes of find_gpu that bear on memory
# The CUDA context with torch's kernels loaded: 0.4 to 0.7 GiB on recent GPUs and drivers; not measured per GPU.
CONTEXT_BYTES = 600 << 20
# Gaps that fit no request. The allocator frees whole cached segments before it fails, so only a part is lost.
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
    """A GPU's memory, and how much of it a step's tensors can use."""

    name: str
    total_bytes: int
    context_bytes: int = CONTEXT_BYTES
    fragmentation: float = FRAGMENTATION
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """The largest `max_memory_allocated` that fits."""
        return int((self.total_bytes - self.context_bytes) / (1 + self.fragmentation))


def parse_memory(text: str) -> int:
    """Bytes of "80GiB", "24 GB" or "40" (GiB)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match.group(2).casefold() not in _UNITS:
        raise SettingError(f"--memory {text!r}: invalid size. Write 80GiB, 24GB or 40 (GiB).")
    size = int(float(match.group(1)) * _UNITS[match.group(2).casefold()])
    if size <= CONTEXT_BYTES:
        raise SettingError(
            f"--memory {text!r}: nothing is left after the CUDA context, which needs {bytes_text(CONTEXT_BYTES)}. Give a larger size."
        )
    return size


def capacity_of(gpu: str | None, memory: str | int | None) -> Capacity | None:
    """The memory to plan for: `memory`, the named GPU's, or this machine's; None if no size is known."""
    if memory is not None:
        size = memory if isinstance(memory, int) else parse_memory(memory)
        try:
            notes = _beyond_cuda(find_gpu(gpu)) if gpu else ()
        except SettingError:  # a GPU that is not in the table is planned by its memory
            notes = ()
        return Capacity(gpu or "the specified memory", size, source="as specified", notes=notes)
    if gpu is not None:
        return _of_hardware(find_gpu(gpu), gpu)
    here = probe()
    if here.kind == "cpu" or here.memory_bytes is None:
        return None
    return Capacity(
        here.name, here.memory_bytes, source="as torch reports it on this machine", notes=_beyond_cuda(here)
    )


def _beyond_cuda(hardware: Hardware) -> tuple[str, ...]:
    """Notes for a GPU that the prediction's rules do not cover."""
    if hardware.kind in {"cuda", "cpu"}:
        return ()
    return (
        f"The predicted peaks follow CUDA's rules, which were not measured on {hardware.name}: weights, gradients and states are "
        "exact there too, but kernels, workspaces and the allocator differ. Leave some memory unused.",
    )


def _of_hardware(hardware: Hardware, name: str) -> Capacity | None:
    if hardware.memory_bytes is None:
        reason = "; ".join(note.rstrip(".") for note in hardware.notes if "memory" in note)
        raise SettingError(
            f"The memory size of {name!r} is unknown ({reason or 'it comes in several sizes'}); add --memory 80GiB."
        )
    notes = tuple(note for note in hardware.notes if any(text in note for text in _ABOUT_SIZE))
    notes += _beyond_cuda(hardware)
    total_mib = _TOTAL_MIB.get(hardware.name.removeprefix(f"{hardware.vendor} "))
    if total_mib is not None and abs(total_mib * 2**20 / hardware.memory_bytes - 1) < 0.1:
        return Capacity(hardware.name, total_mib << 20, source="as its driver reports it", notes=notes)
    size = int(hardware.memory_bytes * _VENDOR_SHARE)
    return Capacity(hardware.name, size, source="the vendor's number less 2 %", notes=notes)
