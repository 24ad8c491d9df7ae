"""Versions come from the user, the project's pins or the installation, in this order."""

import pytest

from halfstep.check import pins
from halfstep.check.options import Options, make_options
from halfstep.check.pins import Pin, installed_pins, parse_pin, pins_for, pins_in_folder
from halfstep.check.project import Project, find_project
from halfstep.errors import SettingError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository without any installed library."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(pins, "installed_pins", lambda: ())
    return tmp_path


def test_a_pin_is_parsed_and_validated():
    """NAME=VERSION and NAME==VERSION; the name is normalised, and mistakes are named."""
    assert parse_pin("torch=2.11", "--with") == parse_pin("Torch==2.11", "--with") == Pin("torch", "2.11", "--with")
    assert parse_pin("nvidia_cudnn_cu13=9.19.0", "--with").package == "cudnn"
    for text, problem in (
        ("torch", "NAME=VERSION"),
        ("tortch=2.11", "Unknown package"),
        ("torch=new", "not a version"),
    ):
        with pytest.raises(SettingError, match=problem):
            parse_pin(text, "--with")


def test_exact_pins_of_requirement_files_count(project):
    """`==` in requirements.txt and pyproject.toml; ranges and comments do not name a version."""
    (project / "requirements.txt").write_text(
        "torch==2.11.0 ; python_version > '3.9'\ntransformers>=4.46\n# accelerate==1.15.0\n"
    )
    (project / "pyproject.toml").write_text(
        '[project]\ndependencies = ["deepspeed[x] == 0.18.5", "bitsandbytes==0.38.*"]\n'
    )
    pinned = {pin.package: (pin.version, pin.origin) for pin in pins_in_folder(project)}
    assert pinned == {
        "torch": ("2.11.0", "requirements.txt"),
        "deepspeed": ("0.18.5", "pyproject.toml"),
        "bitsandbytes": ("0.38", "pyproject.toml"),
    }


def test_the_nearest_pin_wins_and_the_user_wins_over_pins(project):
    """--with, then the folder of the file, then its parents up to the repository's root."""
    (project / "requirements.txt").write_text("torch==2.9.0\naccelerate==1.9.0\n")
    (project / "a").mkdir()
    (project / "a" / "requirements.txt").write_text("torch==2.10.0\n")
    path = str(project / "a")
    known = pins_for(path, (Pin("cudnn", "9.19", "--with"),), look_up=True)
    assert {name: pin.version for name, pin in known.items()} == {
        "cudnn": "9.19",
        "torch": "2.10.0",
        "accelerate": "1.9.0",
    }
    assert pins_for(path, (Pin("torch", "2.13", "--with"),), look_up=True)["torch"].origin == "--with"
    assert pins_for(path, (), look_up=False) == {}


def test_folders_outside_a_repository_are_not_searched(tmp_path, monkeypatch):
    """Without a repository only the file's own folder counts."""
    monkeypatch.setattr(pins, "installed_pins", lambda: ())
    (tmp_path / "requirements.txt").write_text("torch==2.9.0\n")
    (tmp_path / "a").mkdir()
    assert pins_for(str(tmp_path / "a"), (), look_up=True) == {}


def test_installed_packages_are_found_without_importing_them(tmp_path, monkeypatch):
    """dist-info folders on the path count; a CPU build of torch does not."""
    for name in ("accelerate-1.15.0", "torch-2.13.0+cpu", "nvidia_cudnn_cu13-9.19.0.56", "numpy-2.0.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    monkeypatch.setattr(pins.sys, "path", [str(tmp_path), str(tmp_path / "absent")])
    installed_pins.cache_clear()
    try:
        assert {str(pin) for pin in installed_pins()} == {
            "accelerate 1.15.0 (installed)",
            "cudnn 9.19.0.56 (installed)",
        }
    finally:
        installed_pins.cache_clear()


def test_the_project_names_versions(tmp_path):
    """[tool.halfstep.check.with] gives versions; DeepSpeed's also selects the behaviour of configurations."""
    (tmp_path / "pyproject.toml").write_text('[tool.halfstep.check.with]\ntorch = "2.11.0"\ndeepspeed = "0.18.5"\n')
    named = find_project(tmp_path)
    assert [str(pin) for pin in named.pins] == [
        "torch 2.11.0 (pyproject.toml)",
        "deepspeed 0.18.5 (pyproject.toml)",
    ]
    assert Options().settings(named).deepspeed == (0, 18, 5)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "pyproject.toml").write_text("[tool.halfstep.check]\nwith = ['torch']\n")
    with pytest.raises(SettingError, match="write a table"):
        find_project(tmp_path / "b")


def test_deepspeed_of_the_command_line_is_a_pin_too():
    """--deepspeed selects the behaviour and the advisories, before --with."""
    options = make_options((), (), "0.18.2", None, versions=("deepspeed=0.19.8",))
    settings = options.settings(Project())
    assert settings.deepspeed == (0, 18, 2)
    assert str(settings.pins[0]) == "deepspeed 0.18.2 (--deepspeed)"
