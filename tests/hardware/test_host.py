"""The CPU and memory of the machine, from files as kernels write them."""

import os
import platform
import subprocess
import types

import pytest

from halfstep.hardware import host
from halfstep.hardware.host import Cpu, available_memory_bytes, read_cpu, run_program, total_memory_bytes


@pytest.fixture
def linux(tmp_path, monkeypatch):
    """Reads the CPU of a Linux machine with this cpuinfo and this vendor."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")

    def read(cpuinfo="", vendor=""):
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        (tmp_path / "vendor").write_text(vendor)
        return read_cpu(tmp_path / "cpuinfo", tmp_path / "vendor")

    return read


def arm(*parts):
    """The cpuinfo of an Arm kernel with one processor per (implementer, part)."""
    blocks = [
        f"processor\t: {i}\nFeatures\t: fp asimd bf16\nCPU implementer\t: {maker:#x}\nCPU part\t: {part:#05x}\n"
        for i, (maker, part) in enumerate(parts)
    ]
    return "\n".join(blocks)


def test_x86_kernels_name_the_cpu(linux):
    """The name and flags of the first processor stand for all."""
    cpu = linux("processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu amx_bf16\n\nmodel name : Other\n")
    assert cpu == Cpu("Some Xeon", frozenset({"fpu", "amx_bf16"}))


@pytest.mark.parametrize(
    ("parts", "vendor", "name"),
    [
        ([(0x41, 0xD0C)] * 4, "", "Arm Neoverse-N1"),
        ([(0x41, 0xD0C)], "Amazon EC2\n", "AWS Graviton2 (Arm Neoverse-N1)"),
        ([(0x41, 0xD40)], "Amazon EC2\n", "AWS Graviton3 (Arm Neoverse-V1)"),
        ([(0x41, 0xD4F)], "", "Arm Neoverse-V2"),
        ([(0x41, 0xD84)], "Amazon EC2\n", "Arm Neoverse-V3"),
        ([(0x41, 0xD05)] * 4 + [(0x41, 0xD0B)] * 4, "", "Arm Cortex-A55 + Arm Cortex-A76"),
        ([(0x61, 0x022), (0x61, 0x023)], "", "Apple M1"),
        ([(0xC0, 0xAC3)], "", "Ampere AmpereOne"),
        ([(0x41, 0xDFF)], "", "Arm part 0xdff"),
        ([(0x99, 0x001)], "", "Arm implementer 0x99 part 0x001"),
        ([], "", ""),
    ],
)
def test_arm_cpus_are_named_by_their_part_numbers(linux, parts, vendor, name):
    """Arm kernels report numbers, each known part has a name, and AWS machines have Graviton's."""
    assert linux(arm(*parts), vendor).name == name


def test_arm_features_are_flags(linux):
    """Arm calls them features."""
    assert "bf16" in linux(arm((0x41, 0xD49))).flags


def test_absent_files_are_no_error(tmp_path, monkeypatch):
    """Systems without /proc and /sys have a CPU without a name."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert read_cpu(tmp_path / "cpuinfo", tmp_path / "vendor") == Cpu("", frozenset())


def test_macos_names_the_cpu_through_sysctl(monkeypatch):
    """macOS has no /proc; sysctl has the brand."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(host, "run_program", lambda *command: "Apple M2\n" if command[0] == "sysctl" else "")
    assert read_cpu().name == "Apple M2"


def test_available_memory_is_the_kernels_estimate_or_all_of_it(tmp_path, monkeypatch):
    """MemAvailable counts where there is one; elsewhere the total."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  16 kB\nMemAvailable:    8 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", meminfo)
    assert available_memory_bytes() == 8192
    meminfo.unlink()
    assert available_memory_bytes() == total_memory_bytes()


def test_memory_that_the_system_does_not_report_is_none(monkeypatch):
    """No sysconf, or a sysconf without an answer, gives None."""
    monkeypatch.setattr(os, "sysconf", lambda _name: -1)
    monkeypatch.setattr(os, "sysconf_names", {"SC_PHYS_PAGES": 0})
    assert total_memory_bytes() is None
    monkeypatch.setattr(os, "sysconf_names", {})
    assert total_memory_bytes() is None


@pytest.mark.parametrize("failure", [OSError("gone"), subprocess.TimeoutExpired("x", 2), 1])
def test_a_program_that_fails_has_no_output(monkeypatch, failure):
    """A missing program, an error, a timeout and an exit code all give empty text."""

    def run(*_args, **_kwargs):
        if isinstance(failure, Exception):
            raise failure
        return types.SimpleNamespace(returncode=failure, stdout="half of it")

    assert run_program("no-such-program-of-halfstep") == ""
    monkeypatch.setattr(host.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(host.subprocess, "run", run)
    assert run_program("anything") == ""
