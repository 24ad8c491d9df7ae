"""Which module's code is running."""

import torch
from torch import nn

from halfstep.watching.places import Places, next_sequence_nr


class Nested(nn.Module):
    """A model that notes the place in its own code and in a child's hook."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.places = None
        self.notes = []
        self.child.register_forward_pre_hook(lambda *_: self.note("pre-hook"))
        self.child.register_forward_hook(lambda *_: self.note("hook"))

    def note(self, label):
        self.notes.append((label, self.places.current))

    def forward(self, x):
        self.note("before")
        x = self.child(x)
        self.note("after")
        return x * 2


def test_hooks_count_as_their_module_and_code_between_children_as_the_parent():
    """The stack is right before, in and after a child."""
    model = Nested()
    model.places = Places(model)
    with model.places.followed():
        model(torch.ones(1, 2))
    assert model.notes == [("before", ""), ("pre-hook", "child"), ("hook", "child"), ("after", "")]
    assert model.places.current is None


def test_a_module_that_is_no_part_of_the_model_counts_as_its_caller():
    """A loss module has no name in the model, whether the loop calls it or a forward that has just created it."""

    class Scored(nn.Module):
        def forward(self, x):
            return loss(x, torch.ones(1))

    loss, model = nn.MSELoss(), nn.Sequential(Scored())
    places, names = Places(model), []
    loss.register_forward_hook(lambda *_: names.append((places.current, places.outsider)))
    with places.followed():
        loss(torch.ones(1), torch.ones(1))
        model(torch.ones(1))
    assert names == [(None, "MSELoss"), ("0", "MSELoss")]
    assert places.outsider == ""


def test_nodes_of_the_graph_belong_to_the_module_that_created_them():
    """By the sequence number of the node."""
    model = Nested()
    model.places = Places(model)
    with model.places.followed():
        out = model(torch.ones(1, 2, requires_grad=True))
    mul = out.grad_fn
    addmm = mul.next_functions[0][0]
    assert (model.places.of_node(mul._sequence_nr()), model.places.of_node(addmm._sequence_nr())) == ("", "child")
    assert model.places.of_node(next_sequence_nr()) is None


def test_calls_are_as_before_afterwards_even_if_the_model_raises():
    """The class attribute is put back, and the stack is empty."""
    call, places = nn.Module.__call__, Places(nn.Linear(1, 1))
    try:
        with places.followed():
            nn.Linear(2, 2)(torch.ones(1, 3))
    except RuntimeError:
        pass
    else:
        raise AssertionError("the shapes do not fit")
    assert nn.Module.__call__ is call
    assert places.current is None
