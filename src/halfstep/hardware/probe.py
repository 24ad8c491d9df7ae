"""Describes this machine, or a GPU named by the user: the table of facts applied to one device.

Detection and knowledge are separate. `probe()` queries torch, the operating system and `nvidia-smi` for plain
values: a name, a compute capability, a set of CPU flags. The functions `from_cuda`, `from_rocm`, `from_xpu`,
`from_mps` and `from_cpu` turn such values into a `Hardware` by the table in `halfstep.hardware.devices`, and need neither
torch nor a device. Hardware that is not in the table has `known=False`, and its notes list the assumptions.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from halfstep.errors import MissingError, SettingError, unknown
from halfstep.hardware.devices import ARCHITECTURES, DEVICES, UNKNOWN, Facts, find_devices, parse_name
from halfstep.hardware.host import read_cpu, run_program, total_memory_bytes
from halfstep.hardware.torch_build import require_torch

__all__ = ["Hardware", "find_gpu", "from_cpu", "from_cuda", "from_mps", "from_rocm", "from_xpu", "nvidia_gpus", "probe"]

GPU_KINDS = ("cuda", "rocm", "xpu", "mps")
# Turing chips of the TU116 and TU117 kind report capability 7.5 like a T4, but have no tensor cores.
_NO_TENSOR_CORES = re.compile(r"\bGTX\s*16\d\d\b|\bMX\s*[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and how each number format runs on it."""

    name: str
    kind: str  # cuda, rocm, xpu, mps or cpu
    arch: str
    vendor: str
    support: Facts  # format name -> native, slow, emulated or none; support.why(name) has the reason
    memory_bytes: int | None = None
    notes: tuple[str, ...] = ()
    known: bool = True  # False: it is not in the table, and the notes list the assumptions
    count: int = 1

    def __str__(self) -> str:
        memory = f", {self.memory_bytes / 2**30:.1f} GiB" if self.memory_bytes else ""
        many = f"{self.count} x " if self.count > 1 else ""
        return f"{many}{self.name} ({self.arch}){memory}"

    def with_notes(self, *notes: str) -> Hardware:
        """The same hardware with further notes."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))


def from_cuda(name: str, capability: tuple[int, int], memory_bytes: int | None = None, count: int = 1) -> Hardware:
    """An NVIDIA GPU, by the name and compute capability its driver reports."""
    listed = {_capability(arch): arch for arch in ARCHITECTURES if re.fullmatch(r"sm\d+", arch)}
    reported = f"sm{capability[0]}{capability[1]}"
    newest = max(listed)
    known = True
    notes: tuple[str, ...] = ()
    arch = listed.get(capability)
    if capability == (7, 5) and _NO_TENSOR_CORES.search(name):
        arch = "sm75-no-tensor"
    if arch is None:
        older = [c for c in listed if c < capability]
        if not older:
            note = f"{reported} is older than anything Halfstep has facts about; only fp32 is assumed."
            return Hardware(name, "cuda", reported, "NVIDIA", UNKNOWN, memory_bytes, (note,), known=False, count=count)
        arch = listed[max(older)]
        known = capability < newest and max(older)[0] == capability[0]
        if known:
            notes = (f"{reported} is assumed to support the same formats as {arch}.",)
        else:
            assumed = (
                f"it is assumed to support the same formats as {arch}. Measure it with `halfstep probe --measure`."
            )
            notes = (f"Halfstep has no facts about {reported}; {assumed}",)
    facts = ARCHITECTURES[arch]
    where = arch if known and not notes else reported
    return Hardware(
        name, "cuda", where, "NVIDIA", facts.facts, memory_bytes, (*facts.caveats, *notes), known=known, count=count
    )


def from_rocm(name: str, gcn_arch: str, memory_bytes: int | None = None, count: int = 1) -> Hardware:
    """An AMD GPU, by the architecture ROCm reports, such as "gfx90a:sramecc+:xnack-"."""
    arch = gcn_arch.partition(":")[0]
    # The chips of one RDNA 3 family differ in size, not in supported formats.
    arch = "gfx1100" if arch in {"gfx1101", "gfx1102"} else arch
    return _from_table(name, "rocm", arch, "AMD", memory_bytes, count)


def from_xpu(name: str, *, has_xmx: bool | None, memory_bytes: int | None = None, count: int = 1) -> Hardware:
    """An Intel GPU, by its name and whether its driver reports XMX matrix engines (None: not reported)."""
    if re.search(r"data center gpu max", name, re.IGNORECASE):
        arch = "xpu-max"
    elif has_xmx is None:
        arch = next((d.arch for d in find_devices(name) if d.arch.startswith("xpu")), "xpu")
    else:
        arch = "xpu-xmx" if has_xmx else "xpu-plain"
    return _from_table(name, "xpu", arch, "Intel", memory_bytes, count)


def from_mps(chip: str, memory_bytes: int | None = None) -> Hardware:
    """An Apple GPU, by the name of its chip, such as "Apple M2 Pro"."""
    model = re.search(r"\bM\d+\b", chip)
    arch = f"apple-{model.group(0).casefold()}" if model else "mps"
    return _from_table(chip, "mps", arch, "Apple", memory_bytes, 1)


def from_cpu(
    machine: str, flags: Collection[str], name: str = "", memory_bytes: int | None = None, *, system: str = "Linux"
) -> Hardware:
    """A CPU, by `platform.machine()` and the flags of /proc/cpuinfo or `torch.cpu.get_capabilities()`."""
    folded = {flag.casefold() for flag in flags}
    if machine.casefold() in {"x86_64", "amd64"}:
        bf16 = "amx" if "amx_bf16" in folded else "avx512" if "avx512_bf16" in folded else ""
        fp16 = "amx" if "amx_fp16" in folded else "avx512" if "avx512_fp16" in folded else ""
        arch = {
            ("", ""): "x86",
            ("avx512", ""): "x86-avx512-bf16",
            ("", "avx512"): "x86-avx512-fp16",
            ("avx512", "avx512"): "x86-avx512-bf16-fp16",
            ("amx", ""): "x86-amx-bf16",
            ("amx", "avx512"): "x86-amx-bf16-avx512-fp16",
        }.get((bf16, fp16), "x86-amx-fp16")
    elif machine.casefold() in {"aarch64", "arm64"} and system != "Darwin":
        # /proc/cpuinfo and torch spell the fp16 flag differently.
        arch = "arm" + "-bf16" * ("bf16" in folded) + "-fp16" * bool(folded & {"asimdhp", "fphp", "fp16_arith"})
    else:
        arch = machine.casefold() or "cpu"  # including Apple's CPUs, where torch's 16-bit speed has not been measured
    return _from_table(name or f"{machine} CPU", "cpu", arch, "CPU", memory_bytes, 1)


def find_gpu(name: str) -> Hardware:
    """The GPU with this name: "a100", "RTX 4090", "NVIDIA A100-SXM4-80GB", or an architecture such as "sm90"."""
    if not name.strip():
        raise SettingError(
            "The GPU name is empty. Pass one, such as 'A100' or 'RTX 4090', or an architecture such as 'sm90'."
        )
    arch = ARCHITECTURES.get(_architecture(name.strip().casefold()))
    if arch is not None and arch.kind in GPU_KINDS:
        return _from_table(f"{arch.vendor} {arch.label}", arch.kind, arch.name, arch.vendor, None, 1)
    query = parse_name(name)
    matches = find_devices(name)
    if not matches:
        raise unknown(
            "GPU",
            name,
            [d.name for d in DEVICES],
            "An architecture such as sm90 or gfx942 works too; docs/hardware.md describes the table.",
        )
    device = matches[0]
    arch = ARCHITECTURES[device.arch]
    gigabytes, notes = device.memory_gb, list(device.notes)
    full_name = device.name if device.name.startswith(arch.vendor) else f"{arch.vendor} {device.name}"
    if query.laptop or re.search(r"\bmig\b", name, re.IGNORECASE):
        full_name, gigabytes = name.strip(), None
        notes.append("Laptop GPUs and MIG slices have different memory sizes than the full desktop or server GPU.")
    elif query.memory_gb is not None and query.memory_gb not in device.sizes_gb:
        full_name, gigabytes = name.strip(), query.memory_gb
        notes.append(f"{gigabytes} GB is taken from the name; the table has {', '.join(d.name for d in matches)}.")
    elif len(matches) > 1:
        notes.append(f"{name!r} is read as {device.name}; it may also mean {', '.join(d.name for d in matches[1:])}.")
    # Vendors' GB are 2^30 bytes: an 80 GB card has 80 * 2^30, of which the driver reserves some.
    memory = gigabytes * 2**30 if gigabytes else None
    if memory:
        notes.append("The memory size is the vendor's number; the driver reserves some of it.")
    return _from_table(full_name, arch.kind, arch.name, arch.vendor, memory, 1).with_notes(*notes)


def _architecture(text: str) -> str:
    """An architecture as spelled in the table: "sm80" of "sm_80", "compute_80" and "8.0", "gfx90a" of "gfx90a:sramecc+:xnack-"."""
    nvidia = re.fullmatch(r"(?:(?:sm|compute)[_ ]?)(\d+)[af]?|(\d+)\.(\d)", text)
    if nvidia is None:
        return text.partition(":")[0] if text.startswith("gfx") else text
    return f"sm{nvidia.group(1) or nvidia.group(2) + nvidia.group(3)}"


def probe() -> Hardware:
    """The hardware of this machine: the GPU torch can use, else the CPU; a GPU that torch cannot use is in the notes."""
    try:
        torch = require_torch("probe()")
    except MissingError as error:
        gpus = nvidia_gpus()
        hardware = _first(gpus) if gpus else _probe_cpu(None)
        return hardware.with_notes(str(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch warns here about drivers it cannot use, which belongs in the notes
        if torch.cuda.is_available():
            return _probe_cuda(torch)
        if getattr(torch, "xpu", None) is not None and torch.xpu.is_available():
            return _probe_xpu(torch)
        if torch.backends.mps.is_available():
            return _probe_mps(torch)
    hardware = _probe_cpu(torch).with_notes(*(str(w.message).partition("\n")[0] for w in caught))
    unused = nvidia_gpus()
    if unused:
        hardware = hardware.with_notes(
            f"nvidia-smi sees {unused[0].name}, but torch {torch.__version__} cannot use it: it is built without "
            "CUDA, or this driver or GPU is too old for it. Training runs on the CPU."
        )
    return hardware


def _probe_cuda(torch: Any) -> Hardware:
    count = torch.cuda.device_count()
    props = [torch.cuda.get_device_properties(i) for i in range(count)]
    if torch.version.hip:
        every = [from_rocm(p.name, p.gcnArchName, p.total_memory) for p in props]
    else:
        every = [from_cuda(p.name, (p.major, p.minor), p.total_memory) for p in props]
    first = _first(every)
    if not torch.version.hip and not _has_kernels(torch.cuda.get_arch_list(), (props[0].major, props[0].minor)):
        built = ", ".join(torch.cuda.get_arch_list())
        first = first.with_notes(f"torch {torch.__version__} was built for {built}, and has no kernels for this GPU.")
    return first


def _first(every: list[Hardware]) -> Hardware:
    """The first of several devices, with a note if they differ."""
    first = dataclasses.replace(every[0], count=len(every))
    others = sorted({f"{h.name} ({h.arch})" for h in every if h.arch != first.arch})
    if others:
        first = first.with_notes(
            f"The GPUs differ: this describes the first one only; the others are {', '.join(others)}."
        )
    return first


def _has_kernels(built: list[str], capability: tuple[int, int]) -> bool:
    """Whether a torch built for these architectures runs on a GPU of this capability."""
    for entry in built:
        target_name = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", entry)
        if target_name is None:
            continue
        kind, digits, suffix = target_name.groups()
        target = (int(digits[:-1]), int(digits[-1]))
        # Machine code runs on the same major version from its minor version on; PTX on everything later.
        if target == capability or (
            not suffix and target < capability and (kind == "compute" or target[0] == capability[0])
        ):
            return True
    return not built


def _probe_xpu(torch: Any) -> Hardware:
    props = torch.xpu.get_device_properties(0)
    has_xmx = getattr(props, "has_subgroup_matrix_multiply_accumulate", None)
    return from_xpu(props.name, has_xmx=has_xmx, memory_bytes=props.total_memory, count=torch.xpu.device_count())


def _probe_mps(torch: Any) -> Hardware:
    chip = torch.backends.mps.get_name() if hasattr(torch.backends.mps, "get_name") else read_cpu().name
    return from_mps(chip or "Apple GPU", torch.mps.recommended_max_memory())


def _probe_cpu(torch: Any) -> Hardware:
    cpu = read_cpu()
    name, flags = cpu.name, set(cpu.flags)
    if torch is not None and hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        flags |= {key for key, value in capabilities.items() if value is True}
        torch_name = str(capabilities.get("cpu_name", ""))
        name = name or ("" if torch_name == "Unknown" else torch_name)
    hardware = from_cpu(platform.machine(), flags, name, total_memory_bytes(), system=platform.system())
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
    if limit:
        hardware = hardware.with_notes(f"ONEDNN_MAX_CPU_ISA={limit} is set: torch may use less than this CPU has.")
    return hardware


def nvidia_gpus() -> list[Hardware]:
    """The GPUs that the NVIDIA driver reports, whether torch can use them or not."""
    gpus = []
    for line in run_program(
        "nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"
    ).splitlines():
        row = re.fullmatch(r"(.+), (\d+)\.(\d+), (\d+)(?:\.\d+)?", line.strip())
        if row:
            name, major, minor, mebibytes = row.groups()
            gpus.append(from_cuda(name, (int(major), int(minor)), int(mebibytes) * 2**20))
    return gpus


def _from_table(name: str, kind: str, arch: str, vendor: str, memory_bytes: int | None, count: int) -> Hardware:
    entry = ARCHITECTURES.get(arch)
    if entry is None:
        note = (
            "Halfstep has no facts about this hardware, so only fp32 is assumed. "
            "Measure it with `halfstep probe --measure`."
        )
        return Hardware(name, kind, arch, vendor, UNKNOWN, memory_bytes, (note,), known=False, count=count)
    return Hardware(name, kind, arch, vendor, entry.facts, memory_bytes, entry.caveats, count=count)


def _capability(arch: str) -> tuple[int, int]:
    digits = arch.removeprefix("sm")
    return int(digits[:-1]), int(digits[-1])
