"""Integers that keep their values in a trace, and those that are invented."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

from halfstep.planning import integers
from halfstep.planning.answers import plan
from halfstep.planning.fakes import new_mode
from halfstep.planning.tracer import Tracer
from planning_jobs import small_job


def traced(work):
    """The result of `work`, and the tracer it ran under."""
    with new_mode():
        tracer = Tracer(lambda *_: {})
        with tracer:
            return work(), tracer


def peak(loss, size=4096, **changes):
    """The bf16 entry of a plan of the small job with this loss."""
    return plan(small_job(loss=loss, **changes), size, precision=("bf16",)).entries[0]


def test_integers_can_be_read_and_floats_cannot():
    """item, tolist, nonzero and `if` work on integers in a trace; on floating-point tensors they raise."""

    def work():
        mask = torch.arange(6) % 2 == 0
        rows = torch.randn(6, 3)[mask]
        picked = torch.masked_select(torch.randn(6, 3), mask[:, None])
        return mask.sum().item(), mask.nonzero().squeeze(1).tolist(), bool(mask.all()), rows, picked

    (count, places, everywhere, rows, picked), _ = traced(work)
    assert (count, places, everywhere) == (3, [0, 2, 4], False)
    assert isinstance(rows, FakeTensor)
    assert (rows.shape, picked.shape) == ((3, 3), (9,))
    with pytest.raises(DataDependentOutputException):
        traced(lambda: torch.randn(3).sum().item())
    with pytest.raises(DynamicOutputShapeException):
        traced(lambda: torch.nonzero(torch.randn(3) > 0))


def test_results_of_integers_have_data():
    """A mask of 0 and -inf computed from integers can be read; after adding a fake tensor it cannot."""

    def bias():
        return torch.where(torch.arange(4) < 2, 0.0, float("-inf"))

    assert traced(lambda: (bias() < 0).any().item())[0] is True
    with pytest.raises(DataDependentOutputException):
        traced(lambda: (bias() + torch.randn(4) < 0).any().item())


def test_large_integers_are_fake(monkeypatch):
    """Integer tensors above a limit have no data either, so that a trace stays fast."""
    monkeypatch.setattr(integers, "MAX_NUMEL", 1000)
    monkeypatch.setattr(integers, "_MAX_CONSTANTS", 100)
    for size, is_fake in ((100, False), (101, True)):
        assert isinstance(traced(lambda size=size: torch.arange(size))[0], FakeTensor) is is_fake
    for rows, is_fake in ((10, False), (11, True)):
        assert isinstance(traced(lambda rows=rows: torch.arange(100).repeat(rows))[0], FakeTensor) is is_fake


def test_loss_added_to_a_constant_in_place_has_gradients():
    """A loss that is added to a zero tensor in place is planned like any other."""

    def summed(model, batch):
        total = torch.zeros(())
        total += F.cross_entropy(model(batch[0]), batch[1])
        return total

    usual = plan(small_job(), 4096, precision=("bf16",)).entries[0].peak_bytes
    assert abs(peak(summed).peak_bytes - usual) <= 2048


def test_values_of_the_batch_decide():
    """The branch that the batch's integers select is the one that is planned, and selected rows are counted."""

    def masked(model, batch):
        x = model(batch[0])
        return x.sum() if bool((batch[1] >= 0).all()) else x.exp().exp().sum()

    plain = peak(lambda model, batch: model(batch[0]).sum())
    assert peak(masked).peak_bytes == plain.peak_bytes

    def picked(model, batch):
        return model(batch[0][torch.arange(len(batch[1])) % 4 == 0]).sum()

    some = peak(picked)
    assert some.estimate.peak.breakdown["activations"] < plain.estimate.peak.breakdown["activations"] / 2
    assert any("values of the batch" in note and "(index)" in note for note in some.estimate.notes)


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_invented_choices_are_balanced(tokens, experts, data):
    """Each token chooses different experts, and no expert gets more than one token more than another."""
    chosen = data.draw(st.integers(1, experts))
    (_, indices), _ = traced(lambda: torch.randn(tokens, experts).topk(chosen))
    counts = torch.bincount(indices.flatten(), minlength=experts)
    assert counts.max() - counts.min() <= 1
    assert all(len(set(row.tolist())) == chosen for row in indices)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_invented_orders_are_permutations(dim):
    """Invented indices of sort are a permutation along its dimension, and argmax is within its range."""
    order = traced(lambda: torch.randn(5, 7).sort(dim=dim))[0][1]
    assert torch.equal(
        order.sort(dim=dim)[0], torch.arange(order.shape[dim]).view((-1, 1) if dim == 0 else (1, -1)).expand(5, 7)
    )
    assert traced(lambda: torch.randn(5, 7).argmax(dim))[0].max() < order.shape[dim]
    assert traced(lambda: torch.randn(5, 7).argmax())[0].item() == 0


class Experts(nn.Module):
    """Four experts, of which each row uses two; a loop over those in use."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 256) for _ in range(4))

    def forward(self, x):
        chosen = self.router(x).topk(2).indices
        out = x.new_zeros(len(x), 256)
        for index in F.one_hot(chosen, 4).sum((0, 1)).nonzero().flatten().tolist():
            rows = torch.where((chosen == index).any(-1))[0]
            out = out.index_add(0, rows, self.experts[index](x[rows]).to(out.dtype))
        return out


def test_routing_is_planned_with_equal_shares():
    """A mixture of experts is planned, with a note about the assumption."""
    entry = peak(lambda model, batch: model(batch[0]).pow(2).sum(), model=Experts)
    assert any("equal shares were assumed" in note for note in entry.estimate.notes)
    activations = entry.estimate.peak.modules
    assert {activations[f"experts.{i}"] for i in range(4)} == {2048 * 16 * 2}  # half of the rows each, in bf16


def test_ctc_is_as_wide_as_the_longest_target():
    """The CTC loss has a table of two columns for each label of the longest target, and one more."""

    def work():
        log_probs = torch.randn(50, 4, 32, requires_grad=True).log_softmax(-1)
        lengths = torch.tensor([20, 7, 7, 7])
        loss = F.ctc_loss(log_probs, torch.ones(4, 20, dtype=torch.long), torch.full((4,), 50), lengths)
        loss.backward()

    _, tracer = traced(work)
    assert 4 * 50 * 41 * 4 in {event.num_bytes for event in tracer.events}


def test_random_number_state_is_unchanged():
    """A step that draws random integers leaves the random number state unchanged."""

    def drawn(model, batch):
        return F.cross_entropy(model(batch[0][torch.randperm(len(batch[1]))]), batch[1])

    before = torch.get_rng_state()
    assert peak(drawn).peak_bytes > 0
    assert torch.equal(torch.get_rng_state(), before)
