import importlib
import importlib.metadata
import sys

import pytest

from halfstep.errors import HalfstepError, MissingError
from halfstep.hardware.torch_build import require_torch, torch_version


def refuse(monkeypatch, error):
    """Make the import of torch fail with an error."""

    def fail(_name):
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)


def test_torch_is_returned_where_it_is_installed():
    """The module itself comes back, and its version is known without importing it."""
    torch = pytest.importorskip("torch")
    assert require_torch("training") is torch
    assert torch_version() == torch.__version__


def test_absent_torch_is_named_with_the_feature_and_the_command(monkeypatch):
    """Where torch is not installed, the error has the feature that needs it and how to install it."""
    refuse(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch"))
    with pytest.raises(
        MissingError, match=r"Training needs torch, which is not installed.*halfstep\[torch\]"
    ) as caught:
        require_torch("Training")
    assert isinstance(caught.value, HalfstepError)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudnn.so.9: cannot open shared object file"),
        OSError("libcudnn.so.9: cannot open shared object file"),
        ModuleNotFoundError("No module named 'libcudnn.so.9'", name="typing_extensions"),
    ],
    ids=["import-error", "os-error", "dependency"],
)
def test_broken_torch_is_not_called_absent(monkeypatch, error):
    """A torch that is there but cannot be loaded is reported as such, with its error."""
    refuse(monkeypatch, error)
    with pytest.raises(MissingError, match=r"cannot be imported: .*libcudnn"):
        require_torch("Training")


def test_version_is_known_before_torch_is_imported(monkeypatch):
    """The packaged version is reported while torch is not imported."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 2.13.0")
    assert torch_version() == "torch 2.13.0"


def test_version_of_absent_torch_is_none(monkeypatch):
    """No torch, no version, and no exception."""

    def fail(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", fail)
    assert torch_version() is None
