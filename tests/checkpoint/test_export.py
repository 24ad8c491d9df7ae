"""Export of the weights in a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from halfstep.checkpoint.export import export_weights
from tied_models import Tied, Wrapped, trained


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16-lean,master=fp32", "bf16"])
@pytest.mark.parametrize("ema", [False, True], ids=["weights", "ema"])
def test_a_tied_weight_is_exported_in_full_under_all_its_names(precision, ema, tmp_path):
    """Whichever name a reader loads last, the model gets the masters, or the EMA weights."""
    engine = trained(Tied(), precision, ema=0.9)
    engine.save(tmp_path / "saved")
    exported = load_file(export_weights(tmp_path / "saved", tmp_path / "weights.safetensors", ema=ema))
    expected = engine.ema.averages if ema else engine.masters()
    reader = Tied()
    reader.load_state_dict(exported)
    assert all(torch.equal(value, expected[name]) for name, value in reader.named_parameters())


@pytest.mark.parametrize("ema", [False, True], ids=["weights", "ema"])
def test_a_model_with_a_wrapped_part_is_exported_under_its_own_names(ema, tmp_path):
    """The level that a wrapper inserts into names is not in the file, and the masters are exported."""
    model = nn.Sequential(nn.Embedding(16, 8), Wrapped(nn.Linear(8, 8)), nn.Linear(8, 16))
    engine = trained(model, "bf16-lean", ema=0.9)
    engine.save(tmp_path / "saved")
    exported = load_file(export_weights(tmp_path / "saved", tmp_path / "weights.safetensors", ema=ema))
    expected = engine.ema.averages if ema else engine.masters()
    assert {name.replace("module.", "") for name in expected} == set(exported)
    assert all(torch.equal(exported[name.replace("module.", "")], value) for name, value in expected.items())
