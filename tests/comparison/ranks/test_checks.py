"""What a comparison on several ranks rejects before anything runs."""

import pytest
import torch

from halfstep.comparison.compare import compare
from halfstep.comparison.preflight import _check_devices
from halfstep.comparison.ranks.checks import check_rows
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.variant import parse_variants
from halfstep.errors import SettingError


@pytest.mark.parametrize(
    ("backend", "peer", "words"),
    [
        ("ddp", "accelerate", "Accelerate sets up"),
        ("ddp", "fabric:fp16", "--peer fabric:fp16"),
        ("fsdp", "torch-amp", "GradScaler misses overflows"),
    ],
)
def test_baselines_that_do_not_run_on_ranks_are_rejected_by_name(tmp_path, backend, peer, words):
    """With the reason, before a directory is made."""
    with pytest.raises(SettingError, match=words):
        compare("digits", ["fp32"], peers=[peer], backend=backend, ranks=2, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_baselines_that_run_pass():
    """torch-amp under ddp, and everything in one process."""
    check_rows(CompareSettings(ranks=2), parse_variants(["fp32"], ["torch-amp", "torch-amp:fp16"]))
    check_rows(CompareSettings(), parse_variants(["fp32"], ["accelerate", "fabric"]))


def test_settings_of_ranks():
    """auto is ddp on several ranks; one backend per run, and ranks that would not train together are rejected."""
    assert CompareSettings().strategy == "single"
    assert CompareSettings(ranks=2).strategy == "ddp"
    assert CompareSettings(ranks=1, backend="fsdp").strategy == "fsdp"
    with pytest.raises(SettingError, match="a model of its own"):
        CompareSettings(ranks=2, backend="single")
    with pytest.raises(SettingError, match="zero3"):
        CompareSettings(backend="zero3")
    for name in ("ranks", "timeout"):
        with pytest.raises(SettingError, match="at least 1"):
            CompareSettings(**{name: 0})


def test_every_rank_needs_a_gpu(monkeypatch):
    """CPU ranks share the cores."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(SettingError, match="--ranks 2 needs as many cuda devices, and torch sees 1"):
        _check_devices(torch.device("cuda"), CompareSettings(ranks=2))
    _check_devices(torch.device("cpu"), CompareSettings(ranks=2))
