"""Edits of buffers between two forwards."""

import pytest
import torch
from torch import nn

from halfstep.engine.buffers import BufferGuard
from halfstep.engine.replay.edits import BufferEdits


def edited(change):
    """The modules whose buffers were found changed, and the copies by name."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    edits = BufferEdits(BufferGuard(model))
    edits.leave()
    change(model)
    return edits.changed_modules(), {name for saved in edits.copies() for name in saved.group.names}


def recreated(model):
    """The new buffer may be where the old one was."""
    del model[0].running_mean
    model[0].register_buffer("running_mean", torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "module"),
    [
        (lambda model: model[0].running_mean.add_(1), "0"),
        (lambda model: model[1].running_var.detach()[:1].zero_(), "1"),
        (lambda model: setattr(model[1], "running_var", torch.zeros(2)), "1"),
        (recreated, "0"),
        (lambda model: model[0](torch.randn(3, 2)), "0"),  # its kernel counts nothing, its counter does
        (lambda model: model[2].register_buffer("more", torch.ones(1)), "2"),
    ],
)
def test_the_module_with_the_edit_is_found_and_its_buffers_are_copied(change, module):
    """In place, through a view, by assignment, by a forward outside the block."""
    modules, copies = edited(change)
    assert modules == {module}
    assert {name.partition(".")[0] for name in copies} == {module}


def test_without_an_edit_nothing_is_copied():
    """Reading is no edit, and before the first forward of a window there is nothing to compare with."""
    assert edited(lambda model: model[0].running_mean.sum()) == (set(), set())
    edits = BufferEdits(BufferGuard(nn.BatchNorm1d(2)))
    assert not edits.changed_modules()
