"""The CPU and main memory of this machine, as the operating system reports them.

x86 kernels name the CPU in /proc/cpuinfo; Arm kernels give only the numbers of its implementer and part, which are Arm's
MIDR register and are translated here. macOS has `sysctl`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cpu", "available_memory_bytes", "read_cpu", "run_program", "total_memory_bytes"]

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_SYSTEM_VENDOR = Path("/sys/class/dmi/id/sys_vendor")

_IMPLEMENTERS = {
    0x41: "Arm", 0x42: "Broadcom", 0x43: "Cavium", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x51: "Qualcomm",
    0x61: "Apple", 0x6D: "Microsoft", 0x70: "Phytium", 0xC0: "Ampere",
}  # fmt: skip
_PARTS = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD05): "Cortex-A55", (0x41, 0xD07): "Cortex-A57", (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73", (0x41, 0xD0A): "Cortex-A75", (0x41, 0xD0B): "Cortex-A76", (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD0D): "Cortex-A77", (0x41, 0xD40): "Neoverse-V1", (0x41, 0xD41): "Cortex-A78", (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD44): "Cortex-X1", (0x41, 0xD46): "Cortex-A510", (0x41, 0xD47): "Cortex-A710", (0x41, 0xD48): "Cortex-X2",
    (0x41, 0xD49): "Neoverse-N2", (0x41, 0xD4A): "Neoverse-E1", (0x41, 0xD4B): "Cortex-A78C", (0x41, 0xD4D): "Cortex-A715",
    (0x41, 0xD4E): "Cortex-X3", (0x41, 0xD4F): "Neoverse-V2", (0x41, 0xD80): "Cortex-A520", (0x41, 0xD81): "Cortex-A720",
    (0x41, 0xD82): "Cortex-X4", (0x41, 0xD83): "Neoverse-V3AE", (0x41, 0xD84): "Neoverse-V3", (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725", (0x41, 0xD8E): "Neoverse-N3",
    (0x42, 0x516): "ThunderX2", (0x43, 0x0AF): "ThunderX2", (0x46, 0x001): "A64FX", (0x48, 0xD01): "Kunpeng 920",
    (0x4E, 0x004): "Carmel", (0x51, 0x001): "Oryon", (0x6D, 0xD49): "Cobalt 100",
    (0x61, 0x022): "M1", (0x61, 0x023): "M1", (0x61, 0x024): "M1 Pro", (0x61, 0x025): "M1 Pro",
    (0x61, 0x028): "M1 Max", (0x61, 0x029): "M1 Max", (0x61, 0x032): "M2", (0x61, 0x033): "M2",
    (0x61, 0x034): "M2 Pro", (0x61, 0x035): "M2 Pro", (0x61, 0x038): "M2 Max", (0x61, 0x039): "M2 Max",
    (0xC0, 0xAC3): "AmpereOne", (0xC0, 0xAC4): "AmpereOne", (0xC0, 0xAC5): "AmpereOne",
}  # fmt: skip
# Other vendors build on the same cores (a Neoverse-N1 may be an Ampere Altra), so these names need AWS as the vendor.
_GRAVITONS = {
    "Cortex-A72": "Graviton", "Neoverse-N1": "Graviton2", "Neoverse-V1": "Graviton3", "Neoverse-V2": "Graviton4",
}  # fmt: skip


@dataclass(frozen=True)
class Cpu:
    """The CPU of this machine."""

    name: str  # empty if the system does not report one
    flags: frozenset[str]  # instruction set extensions, as the kernel spells them


def read_cpu(cpuinfo: Path = _CPUINFO, system_vendor: Path = _SYSTEM_VENDOR) -> Cpu:
    """Read the name and flags of the CPU; of several processors the first counts, except for the parts of an Arm CPU."""
    if platform.system() == "Darwin":
        return Cpu(run_program("sysctl", "-n", "machdep.cpu.brand_string").strip(), frozenset())
    text = _read_text(cpuinfo)
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip().casefold(), value.strip())
    flags = (values.get("flags") or values.get("features") or "").split()
    return Cpu(values.get("model name") or _arm_name(text, _read_text(system_vendor)), frozenset(flags))


def total_memory_bytes() -> int | None:
    """The main memory of this machine; None where the system does not report it."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    pages = os.sysconf("SC_PHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None


def available_memory_bytes() -> int | None:
    """The main memory that processes can still allocate; all of it where the system reports only that."""
    available = re.search(r"^MemAvailable:\s*(\d+) kB", _read_text(_MEMINFO), re.MULTILINE)
    return int(available[1]) * 1024 if available else total_memory_bytes()


def run_program(program: str, *args: str) -> str:
    """The output of a system program; empty if it is missing, fails or takes longer than 2 seconds."""
    path = shutil.which(program)
    if path is None:
        return ""
    command = [path, *args]
    try:
        # S603: the arguments are constants of this package, and no shell interprets them.
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _arm_name(cpuinfo: str, system_vendor: str) -> str:
    """The name for the implementer and part numbers in an Arm kernel's cpuinfo; big.LITTLE CPUs have several parts."""
    implementers, parts = (
        re.findall(rf"^{key}\s*:\s*(0x[0-9a-f]+)\s*$", cpuinfo, re.MULTILINE | re.IGNORECASE)
        for key in ("CPU implementer", "CPU part")
    )
    names: dict[str, None] = {}  # an ordered set
    for implementer, part in zip(implementers, parts, strict=False):
        maker, number = int(implementer, 16), int(part, 16)
        name = _PARTS.get((maker, number), f"part {part.casefold()}")
        label = f"{_IMPLEMENTERS.get(maker, f'Arm implementer {implementer.casefold()}')} {name}"
        if "Amazon" in system_vendor and maker == 0x41 and name in _GRAVITONS:
            label = f"AWS {_GRAVITONS[name]} ({label})"
        names[label] = None
    return " + ".join(names)
