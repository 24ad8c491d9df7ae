"""Flags and project settings combined."""

import sys

import pytest

from halfstep.check.finding import Finding
from halfstep.check.options import Options, find_device, make_options, parse_version
from halfstep.check.pins import installed_pins
from halfstep.check.project import PerFileIgnore, Project
from halfstep.errors import SettingError
from halfstep.hardware import probe as hardware


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.19.8", (0, 19, 8)),
        ("v0.9", (0, 9)),
        ("0.16.4+cu124", (0, 16, 4)),
        ("0.17.1rc1", (0, 17, 1)),
        ("5.0.0.dev0", (5, 0, 0)),
    ],
)
def test_versions_are_numbers(text, version):
    """Versions parse with or without prefixes and build suffixes."""
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "latest", "1", "9" * 100])
def test_other_versions_are_rejected(text):
    """The error shows the value and how to write it."""
    with pytest.raises(SettingError, match="like 0.19.8"):
        parse_version(text)


def test_the_installed_deepspeed_is_used_unless_another_is_named(tmp_path, monkeypatch):
    """The flag takes precedence over the project, the project over the installed version; nothing is imported."""
    (tmp_path / "deepspeed-0.15.1.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "gone")])
    installed_pins.cache_clear()
    assert Options().settings(Project()).deepspeed == (0, 15, 1)
    assert Options().settings(Project(deepspeed="0.12.0")).deepspeed == (0, 12, 0)
    assert Options(deepspeed="0.19.8").settings(Project(deepspeed="0.12.0")).deepspeed == (0, 19, 8)
    monkeypatch.setattr(sys, "path", [])
    installed_pins.cache_clear()
    assert Options().settings(Project()).deepspeed is None
    installed_pins.cache_clear()
    assert "deepspeed" not in sys.modules


def test_the_transformers_version_is_named_or_installed(tmp_path, monkeypatch):
    """The flag takes precedence over the project, the project over the installed version; text is rejected."""
    (tmp_path / "transformers-4.57.1.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed_pins.cache_clear()
    assert Options().settings(Project()).transformers == (4, 57, 1)
    assert Options().settings(Project(transformers="5.0.0")).transformers == (5, 0, 0)
    assert Options(transformers="5.22.2", gpu="t4").settings(Project(transformers="4.40.0")).transformers == (5, 22, 2)
    installed_pins.cache_clear()
    with pytest.raises(SettingError, match=r"not a version of transformers. Write it like 5\.22\.2"):
        make_options((), (), None, None, "newest")


def test_a_gpu_is_found_by_name_with_its_origin():
    """A GPU is named by product or architecture, by the flag or the project."""
    settings = Options(gpu="t4").settings(Project(gpu="H100"))
    assert (settings.gpu.arch, settings.gpu_origin) == ("sm75", "--gpu t4")
    assert Options().settings(Project(gpu="sm90")).gpu.arch == "sm90"
    assert Options().settings(Project()).gpu is None
    with pytest.raises(SettingError, match="Unknown GPU"):
        make_options((), (), None, "H20O")


def test_auto_uses_the_first_gpu_of_nvidia_smi(monkeypatch):
    """Without any GPU there is an error."""
    find_device.cache_clear()
    monkeypatch.setattr(hardware, "nvidia_gpus", lambda: [hardware.from_cuda("Jetson Orin", (8, 7), 2**33)])
    device = find_device("auto")
    assert (device.name, device.arch, device.memory_gb) == ("Jetson Orin", "sm86", 8)
    find_device.cache_clear()
    monkeypatch.setattr(hardware, "nvidia_gpus", list)
    with pytest.raises(SettingError, match="reports no GPU"):
        find_device("auto")
    find_device.cache_clear()


def test_the_command_line_overrides_the_project_but_not_per_file_ignores(tmp_path):
    """The project's ignores do not filter an explicit selection; a per-file ignore always applies."""
    project = Project(tmp_path, ("HS1",), ("HS104",), (PerFileIgnore("tests/*", ("HS105",)),))

    def wants(code, path, **options):
        finding = Finding(code, "name", "error", path, 1, 1, "")
        return Options(**options).selection(project, str(tmp_path / path)).wants(finding)

    assert not wants("HS104", "a.py")
    assert not wants("HS201", "a.py")
    assert wants("HS104", "a.py", select=("HS104",))
    assert not wants("HS106", "a.py", ignore=("HS106",))
    assert wants("HS105", "a.py")
    assert not wants("HS105", "tests/a.py", select=("HS105",))
