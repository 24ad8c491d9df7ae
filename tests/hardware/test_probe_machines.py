"""What `probe()` makes of machines that are not here, each a small stand-in for torch and the system's programs."""

import os
import platform
import shutil
import subprocess
import types
import warnings
from pathlib import Path

import pytest

from halfstep.errors import MissingError
from halfstep.hardware import probe as hardware
from halfstep.hardware.host import Cpu
from halfstep.hardware.probe import probe

GIB = 2**30


def no_device():
    """A part of torch that finds no device."""
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
    """`torch.cuda` with these devices."""
    return types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(props),
        get_device_properties=lambda i: props[i],
        get_arch_list=lambda: list(built),
    )


def nvidia(name, major, minor, gib=16):
    """The properties torch reports of an NVIDIA GPU."""
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

        def run(command, **_kwargs):
            answer = programs[Path(command[0]).name]
            if isinstance(answer, Exception):
                raise answer
            code, text = answer if isinstance(answer, tuple) else (0, answer)
            return types.SimpleNamespace(returncode=code, stdout=text)

        monkeypatch.setattr(hardware, "require_torch", require)
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in programs else None)
        monkeypatch.setattr(subprocess, "run", run)

    return build


def test_this_machine_can_be_probed():
    """Whatever runs this test, probing it gives a description and no exception."""
    result = probe()
    assert result.kind in {"cuda", "rocm", "xpu", "mps", "cpu"}
    assert result.support["fp32"] == "native"
    assert result.name


def test_cuda_is_probed_through_torch(machine):
    """Name, capability, memory and count come from torch's properties."""
    h200 = nvidia("NVIDIA H200", 9, 0, 140)
    machine(fake_torch(cuda=fake_cuda(h200, h200)))
    result = probe()
    assert (result.kind, result.arch, result.count, result.memory_bytes) == ("cuda", "sm90", 2, 140 * GIB)
    assert result.notes == ()


def test_unlike_gpus_are_said(machine):
    """Where GPUs differ, the description is about the first and names the others."""
    machine(fake_torch(cuda=fake_cuda(nvidia("NVIDIA A100", 8, 0), nvidia("Tesla T4", 7, 5))))
    result = probe()
    assert result.arch == "sm80"
    assert any("The GPUs differ" in note and "Tesla T4 (sm75)" in note for note in result.notes)


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
    """A ROCm build calls its devices cuda; the architecture distinguishes them."""
    props = types.SimpleNamespace(
        name="AMD Instinct MI250X", gcnArchName="gfx90a:sramecc+:xnack-", total_memory=64 * GIB
    )
    machine(fake_torch(cuda=fake_cuda(props), version=types.SimpleNamespace(hip="6.4")))
    result = probe()
    assert (result.kind, result.arch, result.vendor) == ("rocm", "gfx90a", "AMD")
    assert any("subnormals" in note for note in result.notes)


def test_xpu_is_probed_through_torch(machine):
    """An Intel GPU's matrix engines are asked for."""
    props = types.SimpleNamespace(
        name="Intel(R) Arc(TM) A770 Graphics", total_memory=16 * GIB, has_subgroup_matrix_multiply_accumulate=True
    )
    xpu = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda _i: props
    )
    machine(fake_torch(xpu=xpu))
    assert probe().arch == "xpu-xmx"


@pytest.mark.parametrize("has_name", [True, False])
def test_mps_is_probed_through_torch_or_sysctl(machine, monkeypatch, has_name):
    """The chip's name comes from torch if it has one, else from the system."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    mps = types.SimpleNamespace(is_available=lambda: True)
    if has_name:
        mps.get_name = lambda: "Apple M2"
    torch = fake_torch(
        backends=types.SimpleNamespace(mps=mps), mps=types.SimpleNamespace(recommended_max_memory=lambda: 12 * GIB)
    )
    machine(torch, programs={"sysctl": "Apple M2\n"})
    result = probe()
    assert (result.kind, result.arch, result.memory_bytes) == ("mps", "apple-m2", 12 * GIB)


SMI = "Tesla T4, 7.5, 15360\nTesla T4, 7.5, 15360\n"


def test_without_torch_nvidia_smi_describes_the_gpu(machine):
    """No torch, but a driver: the GPUs are described, and a note has what is missing."""
    machine(None, programs={"nvidia-smi": SMI})
    result = probe()
    assert (result.name, result.arch, result.count, result.memory_bytes) == ("Tesla T4", "sm75", 2, 15 * GIB)
    assert any("torch, which is not installed" in note for note in result.notes)


@pytest.mark.parametrize(
    "answer",
    [(9, "NVIDIA-SMI has failed"), "[N/A]\n", "", OSError("no"), subprocess.TimeoutExpired("nvidia-smi", 2)],
    ids=["fails", "no-answer", "empty", "cannot-run", "hangs"],
)
def test_without_torch_and_driver_the_cpu_is_described(machine, answer):
    """A driver program that fails, hangs or prints nothing useful leaves the CPU."""
    machine(None, programs={"nvidia-smi": answer})
    result = probe()
    assert result.kind == "cpu"
    assert any("not installed" in note for note in result.notes)


def test_a_gpu_that_torch_cannot_use_is_said(machine):
    """A CPU build of torch next to an NVIDIA driver trains on the CPU, with a note."""

    def is_available():
        warnings.warn("CUDA initialization: the driver is too old\nmore", UserWarning, stacklevel=2)
        return False

    machine(fake_torch(cuda=types.SimpleNamespace(is_available=is_available)), programs={"nvidia-smi": SMI})
    result = probe()
    assert result.kind == "cpu"
    assert "CUDA initialization: the driver is too old" in result.notes
    assert any("nvidia-smi sees Tesla T4" in note for note in result.notes)


def test_cpu_flags_come_from_torch_where_the_system_has_none(machine, monkeypatch):
    """Where there is no /proc/cpuinfo, torch's list of capabilities is used."""
    capabilities = {
        "architecture": "x86_64",
        "cpu_name": "Fast CPU",
        "amx_bf16": True,
        "amx_fp16": False,
        "num_sockets": 1,
    }
    torch = fake_torch(cpu=types.SimpleNamespace(get_capabilities=lambda: capabilities), xpu=None)
    machine(torch)
    monkeypatch.setattr(hardware, "read_cpu", lambda: Cpu("", frozenset()))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    result = probe()
    assert (result.name, result.arch) == ("Fast CPU", "x86-amx-bf16")


def test_a_mac_without_mps_is_named_by_sysctl(machine, monkeypatch):
    """The CPU of a Mac is named by the system, and not guessed at."""
    machine(fake_torch(), programs={"sysctl": "Apple M1\n"})
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(os, "sysconf_names", {})
    result = probe()
    assert (result.name, result.known, result.memory_bytes) == ("Apple M1", False, None)


def test_a_limited_instruction_set_is_noted(machine, monkeypatch):
    """The library oneDNN can be limited to less than the CPU has; a note reports the limit."""
    machine(fake_torch())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert any("ONEDNN_MAX_CPU_ISA=AVX2" in note for note in probe().notes)


@pytest.mark.parametrize("reported", ["Unknown", ""])
def test_a_cpu_that_nothing_names_has_its_instruction_set_as_name(machine, monkeypatch, reported):
    """Torch's "Unknown" is no name; `platform.machine()` is the fallback."""
    capabilities = {"cpu_name": reported}
    machine(fake_torch(cpu=types.SimpleNamespace(get_capabilities=lambda: capabilities)))
    monkeypatch.setattr(hardware, "read_cpu", lambda: Cpu("", frozenset()))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert probe().name == "aarch64 CPU"
