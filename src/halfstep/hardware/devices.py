"""Which number formats each kind of hardware runs natively, slowly, by emulation or not at all.

"It runs" is not "it is fast". A T4 multiplies bf16 matrices, by converting to fp32 and back. So each format
has one of four levels of support on each architecture:

    native     matrix units or arithmetic that make it faster than fp32 (for fp32: real arithmetic)
    slow       real arithmetic, but no faster than fp32 where torch uses it
    emulated   computed in another format with conversions; slower than fp32
    none       torch cannot run it there, or Halfstep cannot switch it on

There are no speeds here: `halfstep.hardware.measure` measures them. Memory sizes are the vendor's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

__all__ = [
    "ARCHITECTURES",
    "DEVICES",
    "FORMAT_NAMES",
    "UNKNOWN",
    "Architecture",
    "Device",
    "Fact",
    "Facts",
    "Name",
    "Support",
    "find_devices",
    "parse_name",
]

Support = Literal["native", "slow", "emulated", "none"]


@dataclass(frozen=True)
class Fact:
    """How one format runs somewhere, and why."""

    support: Support
    why: str = ""


NATIVE, NONE = Fact("native"), Fact("none")
_TENSOR = Fact("native", "runs on the tensor cores")
_NO_TF32 = Fact("none", "TF32 came with NVIDIA's Ampere (sm80)")
_NO_FP8 = Fact("none", "no fp8 units")
_FP8_OCP = Fact("native", "fp8 tensor cores, e4m3fn and e5m2")
_BEFORE_AMPERE = (
    "no bf16 arithmetic before Ampere (sm80), so it is computed in fp32 with conversions, although "
    "torch.cuda.is_bf16_supported() answers True"
)


@dataclass(frozen=True)
class Facts(Mapping[str, Support]):
    """Format name to support, as a frozen mapping; `why` has the reason for each."""

    fp32: Fact = NATIVE
    tf32: Fact = NONE
    bf16: Fact = NONE
    fp16: Fact = NONE
    fp8: Fact = NONE

    def __getitem__(self, name: str) -> Support:
        return self._fact(name).support

    def __iter__(self) -> Iterator[str]:
        return iter(FORMAT_NAMES)

    def __len__(self) -> int:
        return len(FORMAT_NAMES)

    def why(self, name: str) -> str:
        """The reason for a format's support; may be empty."""
        return self._fact(name).why

    def _fact(self, name: str) -> Fact:
        if name not in FORMAT_NAMES:
            raise KeyError(name)
        fact: Fact = getattr(self, name)
        return fact


FORMAT_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Facts))


@dataclass(frozen=True)
class Architecture:
    """One generation of hardware: its name, who makes it, what it runs, and its caveats."""

    name: str
    label: str
    vendor: str
    kind: str  # cuda, rocm, xpu, mps or cpu: how torch reaches it
    facts: Facts
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class Device:
    """A product by name: its architecture and its nominal memory."""

    name: str
    arch: str
    memory_gb: int | None  # the vendor's number; None where products differ
    aliases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[Name, ...]:
        """Its names, parsed."""
        return tuple(parse_name(text) for text in (self.name, *self.aliases))

    @property
    def sizes_gb(self) -> frozenset[int | None]:
        """The memory sizes that may appear in a name of this device."""
        return frozenset({self.memory_gb, *(name.memory_gb for name in self.spellings)})


@dataclass(frozen=True)
class Name:
    """A parsed device name: product, form factor, memory."""

    core: str
    form: str  # sxm, pcie, nvl or empty
    memory_gb: int | None
    laptop: bool


UNKNOWN = Facts(
    tf32=Fact("none", "Halfstep has no facts about it on this hardware"),
    bf16=Fact("none", "Halfstep has no facts about it on this hardware"),
    fp16=Fact("none", "Halfstep has no facts about it on this hardware"),
    fp8=Fact("none", "Halfstep has no facts about it on this hardware"),
)


def _nvidia(name: str, label: str, facts: Facts, *caveats: str) -> Architecture:
    return Architecture(name, label, "NVIDIA", "cuda", facts, caveats)


def _ampere(fp8: Fact) -> Facts:
    """Ampere and everything after it: tensor cores for TF32, bf16 and fp16; fp8 came later."""
    return Facts(tf32=_TENSOR, bf16=_TENSOR, fp16=_TENSOR, fp8=fp8)


def _before_ampere(fp16: Fact) -> Facts:
    return Facts(tf32=_NO_TF32, bf16=Fact("emulated", _BEFORE_AMPERE), fp16=fp16, fp8=_NO_FP8)


def _amd(name: str, label: str, facts: Facts, *caveats: str) -> Architecture:
    return Architecture(name, label, "AMD", "rocm", facts, caveats)


def _intel(name: str, label: str, sixteen: Fact) -> Architecture:
    tf32 = Fact("none", "Halfstep switches TF32 through CUDA's settings, which Intel GPUs do not have")
    return Architecture(name, label, "Intel", "xpu", Facts(tf32=tf32, bf16=sixteen, fp16=sixteen, fp8=_NO_FP8))


def _apple(name: str, label: str, bf16: Fact) -> Architecture:
    fp16 = Fact("slow", "no matrix units that run 16 bits faster; it saves memory only")
    return Architecture(
        name,
        label,
        "Apple",
        "mps",
        Facts(tf32=Fact("none", "no TF32 units"), bf16=bf16, fp16=fp16, fp8=_NO_FP8),
        ("torch's fused optimizers ignore the loss scale on MPS before torch 2.13: with fp16 there, use fused=False.",),
    )


def _cpu(name: str, label: str, bf16: Fact, fp16: Fact) -> Architecture:
    facts = Facts(tf32=Fact("none", "TF32 is a GPU format"), bf16=bf16, fp16=fp16, fp8=_CPU_FP8)
    return Architecture(name, label, "CPU", "cpu", facts)


_OLD_BUILDS = "CUDA 13 dropped this generation: it needs a torch built with CUDA 12."
_NO_TENSOR = "no tensor cores, and torch sums products in fp32, so fp16 is no faster"
_MATRIX = Fact("native", "runs on the matrix cores")
_CDNA_NO_TF32 = Fact("none", "no TF32 (XF32) units")
_XMX = Fact("native", "runs on the XMX matrix engines")
_NO_XMX = Fact("slow", "no XMX matrix engines, so 16 bits are no faster")
_APPLE_EMULATED = Fact("emulated", "no bf16 arithmetic in the GPU, so Metal computes it in fp32 (macOS 14 and later)")
_APPLE_BF16 = Fact("slow", "no matrix units that run 16 bits faster; it saves memory only (macOS 14 and later)")
_NO_X86_BF16 = Fact("emulated", "neither AVX512-BF16 nor AMX-BF16, so it is computed in fp32 with conversions")
_NO_X86_FP16 = Fact("emulated", "neither AVX512-FP16 nor AMX-FP16, so it is computed in fp32 with conversions")
_AVX_BF16 = Fact("native", "AVX512-BF16 dot products")
_AMX_BF16 = Fact("native", "AMX-BF16 tiles")
# Measured on a Xeon with AVX512-FP16 and AMX-BF16, torch 2.13, 1024 x 1024: fp16 as fast as fp32, bf16 about 3 times.
_AVX_FP16 = Fact("slow", "AVX512-FP16 without AMX-FP16, whose matrix products were measured no faster than fp32's")
_AMX_FP16 = Fact("native", "AMX-FP16 tiles")
# Measured on the same Xeon: torch's fp8 product ran at about 0.1 GFLOP/s.
_CPU_FP8 = Fact("emulated", "torch converts every value on the way; far slower than fp32")
_ARM_BF16 = Fact("native", "the CPU's bf16 matrix instructions")
# Recorded on an Arm CPU without bf16, torch 2.13: 16-bit matrix products at 0.2 GFLOP/s.
_ARM_EMULATED = Fact(
    "emulated", "no such arithmetic; recorded 150 to 350 times slower than fp32 on an Arm CPU, torch 2.13"
)
_ARM_FP16 = Fact("slow", "fp16 arithmetic, but torch's CPU matrix products do not gain from it")


ARCHITECTURES: dict[str, Architecture] = {
    arch.name: arch
    for arch in (
        _nvidia("sm60", "Pascal", _before_ampere(Fact("slow", _NO_TENSOR)), _OLD_BUILDS),
        _nvidia("sm61", "Pascal", _before_ampere(Fact("slow", _NO_TENSOR)), _OLD_BUILDS),
        _nvidia("sm70", "Volta", _before_ampere(_TENSOR), _OLD_BUILDS),
        _nvidia("sm75", "Turing", _before_ampere(_TENSOR)),
        _nvidia("sm75-no-tensor", "Turing without tensor cores", _before_ampere(Fact("slow", _NO_TENSOR))),
        _nvidia("sm80", "Ampere", _ampere(Fact("none", "fp8 came with Ada and Hopper (sm89, sm90)"))),
        _nvidia("sm86", "Ampere", _ampere(Fact("none", "fp8 came with Ada and Hopper (sm89, sm90)"))),
        _nvidia("sm89", "Ada", _ampere(_FP8_OCP)),
        _nvidia("sm90", "Hopper", _ampere(_FP8_OCP)),
        _nvidia("sm100", "Blackwell", _ampere(_FP8_OCP)),
        _nvidia("sm103", "Blackwell Ultra", _ampere(_FP8_OCP)),
        _nvidia("sm120", "Blackwell", _ampere(_FP8_OCP)),
        _amd("gfx908", "CDNA 1", Facts(tf32=_CDNA_NO_TF32, bf16=_MATRIX, fp16=_MATRIX, fp8=_NO_FP8)),
        _amd(
            "gfx90a",
            "CDNA 2",
            Facts(
                tf32=_CDNA_NO_TF32,
                bf16=_MATRIX,
                fp16=Fact("native", "runs on the matrix cores, which flush its subnormals to zero"),
                fp8=_NO_FP8,
            ),
            "Its matrix units flush fp16 and bf16 subnormals to zero, in and out: fp16 values below 2^-14 vanish in "
            "matrix products, so fp16 needs a higher loss scale here than on other GPUs. bf16 has fp32's range.",
        ),
        _amd(
            "gfx942",
            "CDNA 3",
            Facts(
                tf32=Fact("slow", "CDNA 3 has XF32 units, but torch on ROCm does not use them by default"),
                bf16=_MATRIX,
                fp16=_MATRIX,
                fp8=Fact("native", "fp8 matrix cores of the fnuz kind, e4m3fnuz and e5m2fnuz: not NVIDIA's formats"),
            ),
        ),
        _amd(
            "gfx950",
            "CDNA 4",
            Facts(
                tf32=Fact("emulated", "built from several bf16 products"),
                bf16=_MATRIX,
                fp16=_MATRIX,
                fp8=Fact("native", "fp8 matrix cores, e4m3fn and e5m2"),
            ),
        ),
        _amd("gfx1100", "RDNA 3", Facts(tf32=_CDNA_NO_TF32, bf16=_MATRIX, fp16=_MATRIX, fp8=_NO_FP8)),
        # Metal's own bf16 arithmetic came with the M3's GPU; the bf16 that M2 added is its CPU's.
        _apple("apple-m1", "M1 family", _APPLE_EMULATED),
        _apple("apple-m2", "M2 family", _APPLE_EMULATED),
        _apple("apple-m3", "M3 family", _APPLE_BF16),
        _apple("apple-m4", "M4 family", _APPLE_BF16),
        _intel("xpu-max", "Data Center GPU Max", _XMX),
        _intel("xpu-xmx", "Arc and other GPUs with XMX", _XMX),
        _intel("xpu-plain", "GPUs without XMX", _NO_XMX),
        _cpu("x86", "without 16-bit arithmetic", _NO_X86_BF16, _NO_X86_FP16),
        _cpu("x86-avx512-bf16", "AVX512-BF16", _AVX_BF16, _NO_X86_FP16),
        _cpu("x86-avx512-fp16", "AVX512-FP16", _NO_X86_BF16, _AVX_FP16),
        _cpu("x86-avx512-bf16-fp16", "AVX512-BF16 and AVX512-FP16", _AVX_BF16, _AVX_FP16),
        _cpu("x86-amx-bf16", "AMX-BF16", _AMX_BF16, _NO_X86_FP16),
        _cpu("x86-amx-bf16-avx512-fp16", "AMX-BF16 and AVX512-FP16", _AMX_BF16, _AVX_FP16),
        _cpu("x86-amx-fp16", "AMX-BF16 and AMX-FP16", _AMX_BF16, _AMX_FP16),
        _cpu("arm", "without 16-bit arithmetic", _ARM_EMULATED, _ARM_EMULATED),
        _cpu("arm-fp16", "fp16 arithmetic", _ARM_EMULATED, _ARM_FP16),
        _cpu("arm-bf16", "bf16 arithmetic", _ARM_BF16, _ARM_EMULATED),
        _cpu("arm-bf16-fp16", "bf16 and fp16 arithmetic", _ARM_BF16, _ARM_FP16),
    )
}

_TWO_DIES = ("By default torch sees each of its two dies as a separate GPU with half the memory.",)
_SHARED = ("It shares the machine's main memory with the CPU.",)


def _rows(arch: str, *rows: tuple[str, int]) -> tuple[Device, ...]:
    """Plain products of one architecture: name and nominal memory."""
    return tuple(Device(name, arch, memory) for name, memory in rows)


def _macs(arch: str, *chips: str) -> tuple[Device, ...]:
    return tuple(Device(f"Apple {chip}", arch, None, notes=_SHARED) for chip in chips)


# If a product is listed with several memory sizes, the smallest is first: it is the default.
DEVICES: tuple[Device, ...] = (
    *_rows("sm60", ("P100", 16)),
    *_rows("sm61", ("GTX 1060", 6), ("GTX 1070", 8), ("GTX 1080", 8), ("GTX 1080 Ti", 11), ("P40", 24), ("P4", 8)),
    *_rows("sm61", ("GTX 1050 Ti", 4), ("GTX 1070 Ti", 8), ("Titan Xp", 12)),
    *_rows("sm70", ("V100 16GB", 16), ("V100 32GB", 32), ("V100S", 32), ("Titan V", 12)),
    *_rows("sm75", ("T4", 16), ("RTX 2060", 6), ("RTX 2070", 8), ("RTX 2080", 8), ("RTX 2080 Ti", 11)),
    *_rows("sm75", ("RTX 2060 Super", 8), ("RTX 2070 Super", 8), ("RTX 2080 Super", 8), ("Titan RTX", 24)),
    *_rows("sm75", ("Quadro RTX 4000", 8), ("Quadro RTX 5000", 16), ("Quadro RTX 6000", 24), ("Quadro RTX 8000", 48)),
    *_rows("sm75-no-tensor", ("GTX 1650", 4), ("GTX 1660", 6), ("GTX 1660 Ti", 6), ("GTX 1660 Super", 6)),
    *_rows("sm80", ("A100 40GB", 40), ("A100 80GB", 80), ("A800 40GB", 40), ("A800 80GB", 80), ("A30", 24)),
    *_rows("sm86", ("RTX 3060", 12), ("RTX 3070", 8), ("RTX 3080 10GB", 10), ("RTX 3080 12GB", 12)),
    *_rows("sm86", ("RTX 3080 Ti", 12), ("RTX 3090", 24), ("RTX 3090 Ti", 24), ("A10", 24), ("A40", 48)),
    *_rows("sm86", ("RTX 3050", 8), ("RTX 3060 Ti", 8), ("RTX 3070 Ti", 8), ("A2", 16), ("A16", 16), ("A10G", 24)),
    *(
        Device(f"RTX A{n}", "sm86", gb, aliases=(f"A{n}",))
        for n, gb in ((4000, 16), (4500, 20), (5000, 24), (6000, 48))
    ),
    *_rows("sm86", ("RTX A2000 6GB", 6), ("RTX A2000 12GB", 12)),
    *_rows(
        "sm89",
        ("RTX 4060", 8),
        ("RTX 4060 Ti 8GB", 8),
        ("RTX 4060 Ti 16GB", 16),
        ("RTX 4070", 12),
        ("RTX 4070 Super", 12),
    ),
    *_rows("sm89", ("RTX 4070 Ti", 12), ("RTX 4070 Ti Super", 16), ("RTX 4080", 16), ("RTX 4080 Super", 16)),
    *_rows("sm89", ("RTX 4090", 24), ("RTX 4090 D", 24), ("L4", 24), ("L40", 48), ("L40S", 48)),
    *_rows("sm89", ("RTX 2000 Ada", 16), ("RTX 4000 Ada", 20), ("RTX 4500 Ada", 24), ("RTX 5000 Ada", 32)),
    Device("RTX 6000 Ada", "sm89", 48, aliases=("RTX 6000 Ada Generation",)),
    *_rows("sm90", ("H100 SXM", 80), ("H100 PCIe", 80), ("H100 NVL", 94), ("H200", 141), ("H800", 80), ("H20", 96)),
    # The driver's name for it carries the CPU's memory.
    Device("GH200", "sm90", 96, aliases=("GH200 480GB", "GH200 96GB")),
    *_rows("sm100", ("B200", 180)),
    *_rows("sm103", ("B300", 288)),
    *_rows("sm120", ("RTX 5060", 8), ("RTX 5060 Ti 8GB", 8), ("RTX 5060 Ti 16GB", 16)),
    *_rows("sm120", ("RTX 5070", 12), ("RTX 5070 Ti", 16), ("RTX 5080", 16), ("RTX 5090", 32)),
    Device("RTX PRO 6000 Blackwell", "sm120", 96, aliases=("RTX PRO 6000",)),
    *_rows("gfx908", ("MI100", 32)),
    *_rows("gfx90a", ("MI210", 64)),
    Device("MI250", "gfx90a", 128, aliases=("MI250X/MI250",), notes=_TWO_DIES),
    Device("MI250X", "gfx90a", 128, notes=_TWO_DIES),
    *_rows("gfx942", ("MI300X", 192), ("MI300A", 128), ("MI325X", 256)),
    *_rows("gfx950", ("MI350X", 288), ("MI355X", 288)),
    *_rows("gfx1100", ("RX 7900 XT", 20), ("RX 7900 XTX", 24)),
    *_macs("apple-m1", "M1", "M1 Pro", "M1 Max", "M1 Ultra"),
    *_macs("apple-m2", "M2", "M2 Pro", "M2 Max", "M2 Ultra"),
    *_macs("apple-m3", "M3", "M3 Pro", "M3 Max", "M3 Ultra"),
    *_macs("apple-m4", "M4", "M4 Pro", "M4 Max"),
    Device("Data Center GPU Max 1550", "xpu-max", 128, aliases=("Max 1550",), notes=_TWO_DIES),
    Device("Data Center GPU Max 1100", "xpu-max", 48, aliases=("Max 1100",)),
    *_rows("xpu-xmx", ("Arc A750", 8), ("Arc A770", 16), ("Arc B570", 10), ("Arc B580", 12)),
)

_FAMILY = re.compile(r"^(rtx|gtx|rx|arc)(?=[a-z]?\d)")
_FORMS = frozenset({"sxm", "pcie", "nvl"})
# Words of full device names that do not distinguish products.
_NOISE = frozenset(
    {"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "radeon", "intel", "apple", "r", "tm", "corporation"}
    | {"gpu", "graphics", "hbm2", "hbm2e", "hbm3", "hbm3e", "oam", "fhhl", "dgxs", "workstation", "server", "edition"}
    | {"generation", "laptop", "mobile"}
)


def parse_name(name: str) -> Name:
    """Parse a device name, in any case and with any separators: "NVIDIA A100-SXM4-80GB" is a100, sxm, 80."""
    text = name.casefold().partition(" mig ")[0].replace("max-q", "")
    memory = re.search(r"(\d+)\s*gi?b\b|(?<![a-z0-9])(\d+)\s*g\b", text)  # "80 GB", "80G", and not "A10G"
    if memory:
        text = text.replace(memory.group(0), " ")
    words = [re.sub(r"^(sxm)\d$", r"\1", word) for word in re.split(r"[^a-z0-9]+", text) if word]
    core = "".join(word for word in words if word not in _NOISE | _FORMS)
    form = next((word for word in words if word in _FORMS), "")
    size = int(memory.group(1) or memory.group(2)) if memory else None
    return Name(core, form, size, laptop=bool({"laptop", "mobile"} & set(words)))


def find_devices(name: str) -> tuple[Device, ...]:
    """The devices that a name may refer to, most likely first; empty if none is in the table."""
    query = parse_name(name)
    # "4090" for "RTX 4090": the letters of the family may be omitted.
    matches = [
        device
        for device in DEVICES
        if query.core in {short for n in device.spellings for short in (n.core, _FAMILY.sub("", n.core))}
    ]
    matches = [device for device in matches if query.memory_gb in device.sizes_gb] or matches
    matches = [device for device in matches if query.form and query.form == device.spellings[0].form] or matches
    return tuple(matches)
