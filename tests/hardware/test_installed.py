"""The environment of this machine, for advisories."""

import types

import pytest

from halfstep.hardware import installed
from halfstep.hardware.probe import from_cuda


@pytest.mark.parametrize(("number", "text"), [(91900, "9.19.0"), (91002, "9.10.2"), (8907, "8.9.7"), (90000, "9.0.0")])
def test_cudnn_versions_are_decoded(number, text):
    """torch reports cuDNN as one number, in two encodings."""
    assert installed.cudnn_text(number) == text


def test_the_environment_has_the_installed_versions(monkeypatch):
    """Versions of installed packages, cuDNN of torch, and the GPU; what is not installed is absent."""
    cudnn = types.SimpleNamespace(version=lambda: 91900)
    torch = types.SimpleNamespace(__version__="2.11.0+cu130", backends=types.SimpleNamespace(cudnn=cudnn))
    monkeypatch.setitem(installed.sys.modules, "torch", torch)
    monkeypatch.setattr(installed, "_version", {"torch": "2.11.0+cu130"}.get)
    environment = installed.this_environment(from_cuda("NVIDIA H200", (9, 0)))
    assert environment.versions == {"torch": "2.11.0+cu130", "cudnn": "9.19.0"}
    assert (environment.arch, environment.kind) == ("sm90", "cuda")
