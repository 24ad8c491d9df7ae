"""Which optimizer steps the parameters that are clipped."""

import pytest

from check_scripts import codes, script
from halfstep.check.script.objects.owners import clipped_models, optimized_models, share

TWO = """\
import torch
d, g = D(), G()
opt_d = torch.optim.Adam(d.parameters())
opt_g = torch.optim.Adam([{"params": g.parameters()}])
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    opt_d.zero_grad()
    opt_g.zero_grad()
    scaler.scale(loss_fn(d, g, x)).backward()
    scaler.unscale_(%s)
    torch.nn.utils.clip_grad_norm_(d.parameters(), 1.0)
    scaler.step(opt_d)
    scaler.step(opt_g)
    scaler.update()
"""


def test_models_of_optimizers_and_clips():
    """Parameter lists, groups and copies lead to the model's name."""
    facts = script(TWO % "opt_d")
    (clip,) = facts.events("clip")
    assert clipped_models(facts, clip) == {"d"}
    assert [optimized_models(facts, e) for e in facts.events("scaler_step")] == [{"d"}, {"g"}]


@pytest.mark.parametrize(("optimizer", "count"), [("opt_d", 0), ("opt_g", 1)])
def test_unscaling_another_optimizer_is_no_cure(optimizer, count):
    """HS104 is judged per optimizer where the parameters show which one it is."""
    assert sum(code.startswith("HS104") for code in codes(TWO % optimizer)) == count


def test_a_part_shares_parameters_with_its_model():
    """`model` and `model.encoder` do, `model` and `model2` do not."""
    assert share(frozenset({"model"}), frozenset({"model.encoder"}))
    assert not share(frozenset({"model"}), frozenset({"model2"}))
