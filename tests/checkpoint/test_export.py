"""Weights out of a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from halfstep.checkpoint.export import export_weights
from tied_models import Tied, Wrapped, trained


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16-lean,master=fp32", "bf16"])
@pytest.mark.parametrize("ema", [False, True], ids=["weights", "ema"])
def test_a_tied_weight_is_exported_in_full_under_all_its_names(precision, ema, tmp_path):
    """Whichever name a reader loads last, the model has the masters, or the averages."""
    engine = trained(Tied(), precision, ema=0.9)
    engine.save(tmp_path / "saved")
    found = load_file(export_weights(tmp_path / "saved", tmp_path / "weights.safetensors", ema=ema))
    wanted = engine.ema.averages if ema else engine.masters()
    reader = Tied()
    reader.load_state_dict(found)
    assert all(torch.equal(value, wanted[name]) for name, value in reader.named_parameters())


@pytest.mark.parametrize("ema", [False, True], ids=["weights", "ema"])
def test_a_model_with_a_compiled_part_is_exported_under_its_own_names(ema, tmp_path):
    """The level that torch.compile puts into names is in no file, and the masters are found all the same."""
    model = nn.Sequential(nn.Embedding(16, 8), Wrapped(nn.Linear(8, 8)), nn.Linear(8, 16))
    engine = trained(model, "bf16-lean", ema=0.9)
    engine.save(tmp_path / "saved")
    found = load_file(export_weights(tmp_path / "saved", tmp_path / "weights.safetensors", ema=ema))
    wanted = engine.ema.averages if ema else engine.masters()
    assert {name.replace("_orig_mod.", "") for name in wanted} == set(found)
    assert all(torch.equal(found[name.replace("_orig_mod.", "")], value) for name, value in wanted.items())
