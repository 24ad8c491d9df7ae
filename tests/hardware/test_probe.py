import pytest

from halfstep.errors import SettingError
from halfstep.hardware.devices import UNKNOWN
from halfstep.hardware.probe import find_gpu, from_cpu, from_cuda, from_mps, from_rocm, from_xpu

GIB = 2**30


@pytest.mark.parametrize(
    ("capability", "arch", "known", "bf16", "fp8"),
    [
        ((6, 0), "sm60", True, "emulated", "none"),
        ((6, 1), "sm61", True, "emulated", "none"),
        ((7, 0), "sm70", True, "emulated", "none"),
        ((7, 5), "sm75", True, "emulated", "none"),
        ((8, 0), "sm80", True, "native", "none"),
        ((8, 6), "sm86", True, "native", "none"),
        ((8, 7), "sm87", True, "native", "none"),
        ((8, 9), "sm89", True, "native", "native"),
        ((9, 0), "sm90", True, "native", "native"),
        ((10, 0), "sm100", True, "native", "native"),
        ((10, 3), "sm103", True, "native", "native"),
        ((11, 0), "sm110", False, "native", "native"),
        ((12, 0), "sm120", True, "native", "native"),
        ((13, 0), "sm130", False, "native", "native"),
        ((3, 5), "sm35", False, "none", "none"),
    ],
)
def test_capability_decides_what_an_unnamed_gpu_runs(capability, arch, known, bf16, fp8):
    """A GPU nobody listed gets the facts of its capability, and an assumption is marked as one."""
    result = from_cuda("NVIDIA Something New", capability)
    assert (result.arch, result.known, result.support["bf16"], result.support["fp8"]) == (arch, known, bf16, fp8)
    assert known or any("no facts" in note or "older than" in note for note in result.notes)


@pytest.mark.parametrize(
    ("name", "fp16"),
    [
        ("Tesla T4", "native"),
        ("NVIDIA GeForce RTX 2080 Ti", "native"),
        ("NVIDIA GeForce GTX 1660 Ti", "slow"),
        ("NVIDIA GeForce GTX 1650", "slow"),
        ("Quadro T1000", "slow"),
        ("NVIDIA GeForce MX450", "slow"),
    ],
)
def test_turing_without_tensor_cores_is_told_by_its_name(name, fp16):
    """GTX 16 and its siblings report a T4's capability, and have no tensor cores."""
    assert from_cuda(name, (7, 5)).support["fp16"] == fp16


@pytest.mark.parametrize(
    ("gcn", "arch", "known"),
    [
        ("gfx90a:sramecc+:xnack-", "gfx90a", True),
        ("gfx942", "gfx942", True),
        ("gfx1101", "gfx1100", True),
        ("gfx906", "gfx906", False),
    ],
)
def test_rocm_architecture_decides(gcn, arch, known):
    """The features ROCm appends to an architecture do not matter; an unlisted one is unknown."""
    result = from_rocm("AMD Something", gcn)
    assert (result.arch, result.known, result.vendor) == (arch, known, "AMD")
    assert known or result.support == UNKNOWN


@pytest.mark.parametrize(
    ("name", "has_xmx", "arch"),
    [
        ("Intel(R) Data Center GPU Max 1550", True, "xpu-max"),
        ("Intel(R) Arc(TM) A770 Graphics", True, "xpu-xmx"),
        ("Intel(R) Arc(TM) B580 Graphics", None, "xpu-xmx"),
        ("Intel(R) Graphics", False, "xpu-plain"),
        ("Intel(R) Graphics", None, "xpu"),
    ],
)
def test_xmx_decides_for_intel(name, has_xmx, arch):
    """The driver's word on matrix engines counts; without it the name; without either it is unknown."""
    result = from_xpu(name, has_xmx=has_xmx)
    assert result.arch == arch
    assert result.known is (arch != "xpu")


@pytest.mark.parametrize(
    ("chip", "arch", "bf16"),
    [
        ("Apple M1", "apple-m1", "emulated"),
        ("Apple M2 Pro", "apple-m2", "emulated"),
        ("Apple M3 Max", "apple-m3", "slow"),
        ("Apple M4", "apple-m4", "slow"),
        ("Apple M5", "apple-m5", "none"),
        ("AMD Radeon Pro 5500M", "mps", "none"),
    ],
)
def test_chip_decides_for_apple(chip, arch, bf16):
    """The chip's generation decides; a later one than the table's is unknown, not guessed."""
    result = from_mps(chip)
    assert (result.arch, result.support["bf16"]) == (arch, bf16)
    assert result.known is (bf16 != "none")


@pytest.mark.parametrize(
    ("cpu", "flags", "bf16", "fp16"),
    [
        ("x86_64", "fma avx2 f16c", "emulated", "emulated"),
        ("AMD64", "avx512f avx512_bf16", "native", "emulated"),
        ("x86_64", "avx512_fp16", "emulated", "slow"),
        ("x86_64", "avx512_bf16 avx512_fp16", "native", "slow"),
        ("x86_64", "amx_bf16 amx_tile", "native", "emulated"),
        ("x86_64", "avx512_bf16 avx512_fp16 amx_bf16 amx_tile", "native", "slow"),
        ("x86_64", "avx512_bf16 avx512_fp16 amx_bf16 amx_fp16", "native", "native"),
        ("aarch64", "fp asimd", "emulated", "emulated"),
        ("aarch64", "fp asimd fphp asimdhp", "emulated", "slow"),
        ("aarch64", "asimd bf16", "native", "emulated"),
        ("arm64", "neon bf16 fp16_arith", "native", "slow"),
    ],
)
def test_cpu_flags_decide(cpu, flags, bf16, fp16):
    """AVX512, AMX and Arm flags each decide the format they are about, in any spelling of the machine."""
    result = from_cpu(cpu, flags.split())
    assert (result.known, result.support["bf16"], result.support["fp16"]) == (True, bf16, fp16)


@pytest.mark.parametrize(
    ("cpu", "system"), [("riscv64", "Linux"), ("ppc64le", "Linux"), ("arm64", "Darwin"), ("", "Linux")]
)
def test_cpus_nobody_measured_are_unknown(cpu, system):
    """Flags of a CPU that the table does not cover prove nothing."""
    result = from_cpu(cpu, {"bf16"}, system=system)
    assert not result.known
    assert result.support == UNKNOWN


@pytest.mark.parametrize(
    ("asked", "name", "arch", "gib"),
    [
        ("a100", "NVIDIA A100 40GB", "sm80", 40),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB", "sm80", 80),
        ("A100 80 GB", "NVIDIA A100 80GB", "sm80", 80),
        ("A100 64GB", "A100 64GB", "sm80", 64),
        ("v100-32gb", "NVIDIA V100 32GB", "sm70", 32),
        ("4090", "NVIDIA RTX 4090", "sm89", 24),
        ("rtx-4070-ti-super", "NVIDIA RTX 4070 Ti Super", "sm89", 16),
        ("RTX 4070", "NVIDIA RTX 4070", "sm89", 12),
        ("H100", "NVIDIA H100 SXM", "sm90", 80),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe", "sm90", 80),
        ("h100 nvl", "NVIDIA H100 NVL", "sm90", 94),
        ("NVIDIA GH200 480GB", "NVIDIA GH200", "sm90", 96),
        ("mi250x", "AMD MI250X", "gfx90a", 128),
        ("m2 pro", "Apple M2 Pro", "apple-m2", None),
        ("Intel(R) Arc(TM) B580 Graphics", "Intel Arc B580", "xpu-xmx", 12),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "NVIDIA GeForce RTX 3060 Laptop GPU", "sm86", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "sm80", None),
        ("sm90", "NVIDIA Hopper", "sm90", None),
        ("GFX942", "AMD CDNA 3", "gfx942", None),
        ("sm_80", "NVIDIA Ampere", "sm80", None),
        ("sm_90a", "NVIDIA Hopper", "sm90", None),
        ("compute_75", "NVIDIA Turing", "sm75", None),
        ("8.9", "NVIDIA Ada", "sm89", None),
        ("gfx90a:sramecc+:xnack-", "AMD CDNA 2", "gfx90a", None),
        ("A100 80G", "NVIDIA A100 80GB", "sm80", 80),
        ("a10g", "NVIDIA A10G", "sm86", 24),
        ("NVIDIA RTX A5000", "NVIDIA RTX A5000", "sm86", 24),
        ("RTX 4060 Ti 16GB", "NVIDIA RTX 4060 Ti 16GB", "sm89", 16),
        ("TITAN Xp", "NVIDIA Titan Xp", "sm61", 12),
        ("RTX 2080 SUPER", "NVIDIA RTX 2080 Super", "sm75", 8),
    ],
)
def test_a_gpu_is_found_however_it_is_written(asked, name, arch, gib):
    """Case, spaces, dashes, vendor words and full driver names lead to the same device."""
    result = find_gpu(asked)
    assert (result.name, result.arch) == (name, arch)
    assert result.memory_bytes == (gib * GIB if gib else None)


def test_an_ambiguous_name_takes_the_smallest_and_says_so():
    """A name that covers several memories is taken as the smallest, and the others are named."""
    assert any("it may also mean A100 80GB" in note for note in find_gpu("A100").notes)


@pytest.mark.parametrize(("asked", "hint"), [("RTX 4095", "RTX 4090"), ("H2000", "H200"), ("T5", "T4")])
def test_an_unknown_gpu_is_rejected_with_the_nearest(asked, hint):
    """The error names the nearest devices, not all of them, and that an architecture will do."""
    with pytest.raises(SettingError, match=f"Unknown GPU '{asked}'. Did you mean '{hint}'") as caught:
        find_gpu(asked)
    assert "sm90" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("asked", ["", "  ", "x86", "arm-bf16"])
def test_what_is_no_gpu_is_rejected(asked):
    """An empty name and a CPU are not GPUs."""
    with pytest.raises(SettingError, match="GPU"):
        find_gpu(asked)


def test_hardware_prints_as_one_line():
    """Name, architecture, memory and count are what its text shows."""
    assert str(from_cuda("NVIDIA H200", (9, 0), 141 * GIB, count=8)) == "8 x NVIDIA H200 (sm90), 141.0 GiB"
    assert str(find_gpu("sm75")) == "NVIDIA Turing (sm75)"
    assert len({find_gpu("T4"), find_gpu("Tesla T4")}) == 1
