import os
import platform
import shutil
import subprocess
import types
import warnings
from pathlib import Path

import pytest

from halfstep import hardware
from halfstep.devices import UNKNOWN
from halfstep.errors import MissingError, SettingError
from halfstep.hardware import find_gpu, from_cpu, from_cuda, from_mps, from_rocm, from_xpu, probe

GIB = 2**30


def no_device():
    return types.SimpleNamespace(is_available=lambda: False)


def fake_torch(**parts):
    """A torch with no device at all, and the parts of it that a test replaces."""
    base = {
        "__version__": "2.13.0",
        "cuda": no_device(),
        "xpu": no_device(),
        "backends": types.SimpleNamespace(mps=no_device()),
        "cpu": types.SimpleNamespace(),
        "version": types.SimpleNamespace(hip=None),
    }
    return types.SimpleNamespace(**(base | parts))


def fake_cuda(*props, built=("sm_75", "sm_80", "sm_86", "sm_90", "sm_120")):
    return types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(props),
        get_device_properties=lambda i: props[i],
        get_arch_list=lambda: list(built),
    )


def nvidia(name, major, minor, gib=16):
    return types.SimpleNamespace(name=name, major=major, minor=minor, total_memory=gib * GIB)


@pytest.fixture
def machine(monkeypatch):
    """Sets what `probe()` sees: a torch or none, programs and their answers, and no real hardware."""

    def build(torch=None, programs=None):
        programs = programs or {}

        def require(feature):
            if torch is None:
                raise MissingError(f"{feature} needs torch, which is not installed.")
            return torch

        def run(command, **kwargs):
            answer = programs[Path(command[0]).name]
            if isinstance(answer, Exception):
                raise answer
            code, text = answer if isinstance(answer, tuple) else (0, answer)
            return types.SimpleNamespace(returncode=code, stdout=text)

        monkeypatch.setattr(hardware, "require_torch", require)
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in programs else None)
        monkeypatch.setattr(subprocess, "run", run)

    return build


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
    found = from_cuda("NVIDIA Something New", capability)
    assert (found.arch, found.known, found.support["bf16"], found.support["fp8"]) == (arch, known, bf16, fp8)
    assert known or any("no facts" in note or "older than" in note for note in found.notes)


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
    found = from_rocm("AMD Something", gcn)
    assert (found.arch, found.known, found.vendor) == (arch, known, "AMD")
    assert known or found.support == UNKNOWN


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
    found = from_xpu(name, has_xmx=has_xmx)
    assert found.arch == arch
    assert found.known is (arch != "xpu")


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
    found = from_mps(chip)
    assert (found.arch, found.support["bf16"]) == (arch, bf16)
    assert found.known is (bf16 != "none")


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
    found = from_cpu(cpu, flags.split())
    assert (found.known, found.support["bf16"], found.support["fp16"]) == (True, bf16, fp16)


@pytest.mark.parametrize(("cpu", "system"), [("riscv64", "Linux"), ("ppc64le", "Linux"), ("arm64", "Darwin"), ("", "Linux")])
def test_cpus_nobody_measured_are_unknown(cpu, system):
    """Flags of a CPU that the table does not cover prove nothing."""
    found = from_cpu(cpu, {"bf16"}, system=system)
    assert not found.known
    assert found.support == UNKNOWN


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
    ],
)
def test_a_gpu_is_found_however_it_is_written(asked, name, arch, gib):
    """Case, spaces, dashes, vendor words and full driver names lead to the same device."""
    found = find_gpu(asked)
    assert (found.name, found.arch) == (name, arch)
    assert found.memory_bytes == (gib * GIB if gib else None)


def test_an_ambiguous_name_takes_the_smallest_and_says_so():
    """A name that covers several memories is taken as the smallest, and the others are named."""
    assert any("it may also mean A100 80GB" in note for note in find_gpu("A100").notes)


@pytest.mark.parametrize(("asked", "hint"), [("RTX 4095", "RTX 4090"), ("H20", "H200"), ("T5", "T4")])
def test_an_unknown_gpu_is_refused_with_the_nearest(asked, hint):
    """The error names the nearest device and the list, and that an architecture will do."""
    with pytest.raises(SettingError, match=f"Unknown GPU '{asked}'. Did you mean '{hint}'") as caught:
        find_gpu(asked)
    assert "sm90" in str(caught.value)


@pytest.mark.parametrize("asked", ["", "  ", "x86", "arm-bf16"])
def test_what_is_no_gpu_is_refused(asked):
    """An empty name and a CPU are not GPUs."""
    with pytest.raises(SettingError, match="GPU"):
        find_gpu(asked)


def test_hardware_prints_as_one_line():
    """Name, architecture, memory and count are what its text shows."""
    assert str(from_cuda("NVIDIA H200", (9, 0), 141 * GIB, count=8)) == "8 x NVIDIA H200 (sm90), 141.0 GiB"
    assert str(find_gpu("sm75")) == "NVIDIA Turing (sm75)"
    assert len({find_gpu("T4"), find_gpu("Tesla T4")}) == 1


def test_this_machine_can_be_probed():
    """Whatever runs this test, probing it gives a description and no exception."""
    found = probe()
    assert found.kind in {"cuda", "rocm", "xpu", "mps", "cpu"}
    assert found.support["fp32"] == "native"
    assert found.name


def test_cuda_is_probed_through_torch(machine):
    """Name, capability, memory and count come from torch's properties."""
    h200 = nvidia("NVIDIA H200", 9, 0, 140)
    machine(fake_torch(cuda=fake_cuda(h200, h200)))
    found = probe()
    assert (found.kind, found.arch, found.count, found.memory_bytes) == ("cuda", "sm90", 2, 140 * GIB)
    assert found.notes == ()


def test_unlike_gpus_are_said(machine):
    """Where GPUs differ, the description is about the first and names the others."""
    machine(fake_torch(cuda=fake_cuda(nvidia("NVIDIA A100", 8, 0), nvidia("Tesla T4", 7, 5))))
    found = probe()
    assert found.arch == "sm80"
    assert any("The GPUs differ" in note and "Tesla T4 (sm75)" in note for note in found.notes)


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_80", "sm_90"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_75", "compute_75"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_75", "sm_80"], (6, 1), False),
        (["sm_75", "gfx90a"], (7, 0), False),
        ([], (7, 0), True),
    ],
)
def test_a_build_without_kernels_for_the_gpu_is_said(machine, built, capability, runs):
    """A torch that was not built for this GPU is pointed out before the first kernel fails."""
    machine(fake_torch(cuda=fake_cuda(nvidia("NVIDIA GPU", *capability), built=built)))
    assert any("no kernels for this GPU" in note for note in probe().notes) is not runs


def test_rocm_is_probed_through_torch(machine):
    """A ROCm build calls its devices cuda; the architecture tells them apart."""
    props = types.SimpleNamespace(name="AMD Instinct MI250X", gcnArchName="gfx90a:sramecc+:xnack-", total_memory=64 * GIB)
    machine(fake_torch(cuda=fake_cuda(props), version=types.SimpleNamespace(hip="6.4")))
    found = probe()
    assert (found.kind, found.arch, found.vendor) == ("rocm", "gfx90a", "AMD")
    assert any("subnormals" in note for note in found.notes)


def test_xpu_is_probed_through_torch(machine):
    """An Intel GPU's matrix engines are asked for."""
    props = types.SimpleNamespace(
        name="Intel(R) Arc(TM) A770 Graphics", total_memory=16 * GIB, has_subgroup_matrix_multiply_accumulate=True
    )
    xpu = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda i: props)
    machine(fake_torch(xpu=xpu))
    assert probe().arch == "xpu-xmx"


@pytest.mark.parametrize("has_name", [True, False])
def test_mps_is_probed_through_torch_or_sysctl(machine, has_name):
    """The chip's name comes from torch where it tells, else from the system."""
    mps = types.SimpleNamespace(is_available=lambda: True)
    if has_name:
        mps.get_name = lambda: "Apple M2"
    torch = fake_torch(
        backends=types.SimpleNamespace(mps=mps), mps=types.SimpleNamespace(recommended_max_memory=lambda: 12 * GIB)
    )
    machine(torch, programs={"sysctl": "Apple M2\n"})
    found = probe()
    assert (found.kind, found.arch, found.memory_bytes) == ("mps", "apple-m2", 12 * GIB)


SMI = "Tesla T4, 7.5, 15360\nTesla T4, 7.5, 15360\n"


def test_without_torch_nvidia_smi_describes_the_gpu(machine):
    """No torch, but a driver: the GPUs are described, and what is missing is said."""
    machine(None, programs={"nvidia-smi": SMI})
    found = probe()
    assert (found.name, found.arch, found.count, found.memory_bytes) == ("Tesla T4", "sm75", 2, 15 * GIB)
    assert any("torch, which is not installed" in note for note in found.notes)


@pytest.mark.parametrize(
    "answer",
    [(9, "NVIDIA-SMI has failed"), "[N/A]\n", "", OSError("no"), subprocess.TimeoutExpired("nvidia-smi", 2)],
    ids=["fails", "no-answer", "empty", "cannot-run", "hangs"],
)
def test_without_torch_and_driver_the_cpu_is_described(machine, answer):
    """A driver program that fails, hangs or says nothing useful leaves the CPU."""
    machine(None, programs={"nvidia-smi": answer})
    found = probe()
    assert found.kind == "cpu"
    assert any("not installed" in note for note in found.notes)


def test_a_gpu_that_torch_cannot_use_is_said(machine):
    """A CPU build of torch beside an NVIDIA driver trains on the CPU, and that is said."""

    def is_available():
        warnings.warn("CUDA initialization: the driver is too old\nmore", UserWarning, stacklevel=2)
        return False

    machine(fake_torch(cuda=types.SimpleNamespace(is_available=is_available)), programs={"nvidia-smi": SMI})
    found = probe()
    assert found.kind == "cpu"
    assert "CUDA initialization: the driver is too old" in found.notes
    assert any("nvidia-smi sees Tesla T4" in note for note in found.notes)


def test_cpu_flags_come_from_torch_where_the_system_has_none(machine, monkeypatch, tmp_path):
    """Where there is no /proc/cpuinfo, torch's list of capabilities is used."""
    capabilities = {"architecture": "x86_64", "cpu_name": "Fast CPU", "amx_bf16": True, "amx_fp16": False, "num_sockets": 1}
    torch = fake_torch(cpu=types.SimpleNamespace(get_capabilities=lambda: capabilities), xpu=None)
    machine(torch)
    monkeypatch.setattr(hardware, "_read_cpuinfo", lambda path: ("", set()))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    found = probe()
    assert (found.name, found.arch) == ("Fast CPU", "x86-amx-bf16")


def test_a_mac_without_mps_is_named_by_sysctl(machine, monkeypatch):
    """The CPU of a Mac is named by the system, and not guessed at."""
    machine(fake_torch(), programs={"sysctl": "Apple M1\n"})
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(os, "sysconf_names", {})
    found = probe()
    assert (found.name, found.known, found.memory_bytes) == ("Apple M1", False, None)


def test_a_limited_instruction_set_is_said(machine, monkeypatch):
    """oneDNN can be told to use less than the CPU has; then the facts may not hold."""
    machine(fake_torch())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert any("ONEDNN_MAX_CPU_ISA=AVX2" in note for note in probe().notes)


@pytest.mark.parametrize(
    ("text", "name", "flag"),
    [
        ("processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu amx_bf16\n\nmodel name : Other\n", "Some Xeon", "amx_bf16"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd bf16\n", "", "bf16"),
    ],
    ids=["x86", "arm"],
)
def test_cpuinfo_is_read_on_both_kinds_of_linux(tmp_path, text, name, flag):
    """x86 calls them flags and Arm features; the first processor stands for all."""
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    found = hardware._read_cpuinfo(path)
    assert found[0] == name
    assert flag in found[1]


def test_absent_cpuinfo_is_no_error(tmp_path):
    """Systems without /proc are described without it."""
    assert hardware._read_cpuinfo(tmp_path / "nothing") == ("", set())
