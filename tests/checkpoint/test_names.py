"""A model's own names, without the levels of wrappers."""

import pytest
import torch
from torch import nn

from halfstep.checkpoint.names import clean_name, clean_names, match_names
from tied_models import Wrapped


class Own(nn.Module):
    """A model of a user's whose submodules are called like torch's wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Sequential(Wrapped(nn.Linear(2, 2)))
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("module.a.weight", "a.weight"),
        ("_orig_mod.module.a", "a"),
        ("a._orig_mod.b.module.c", "a.b.c"),
        ("module", "module"),
        ("a.module", "a.module"),
        ("modules.a", "modules.a"),
        ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b", "a.b"),
    ],
)
def test_levels_that_look_like_a_wrappers_are_removed_from_names_alone(name, clean):
    """Without a model, the level's name decides."""
    assert clean_name(name) == clean


@pytest.mark.parametrize(
    "wrap", [lambda m: m, Wrapped, lambda m: Wrapped(Wrapped(m))], ids=["bare", "wrapped", "twice"]
)
def test_only_levels_of_wrappers_are_removed(wrap):
    """The type of the module decides, not the name of the level, and every tensor has a name of its own."""
    own, model = Own(), wrap(Own())
    clean = clean_names(model, model.state_dict())
    assert sorted(clean.values()) == sorted(clean_names(own, own.state_dict()).values())
    assert set(clean.values()) == {
        "module.weight",
        "module.bias",
        "_orig_mod.0.weight",
        "_orig_mod.0.bias",
        "weight",
    }


@pytest.mark.slow  # it imports the compiler
def test_a_compiled_model_has_the_names_of_the_model():
    """torch.compile's wrapper is recognized by its type."""
    compiled = torch.compile(Own(), backend="eager")
    names = clean_names(compiled, compiled.state_dict())
    assert names["_orig_mod.module.weight"] == "module.weight"
    assert names["_orig_mod._orig_mod.0.module.bias"] == "_orig_mod.0.bias"


def test_a_wrapper_that_hides_its_level_itself_keeps_names_right():
    """Activation checkpointing removes its level from state_dict() but not from the modules."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))))
    assert set(clean_names(model, model.state_dict()).values()) == {"0.0.weight", "0.0.bias"}
    assert set(clean_names(model, [n for n, _ in model.named_parameters()]).values()) == {"0.0.weight", "0.0.bias"}


def test_two_tensors_never_get_one_name():
    """A wrapper with a tensor that has the name of one inside it."""

    class Odd(Wrapped):
        def __init__(self, inner):
            super().__init__(inner)
            self.weight = nn.Parameter(torch.ones(1))

    model = Odd(nn.Linear(2, 2))
    names = clean_names(model, model.state_dict())
    assert names == {"weight": "weight", "module.weight": "module.weight", "module.bias": "bias"}


def test_names_match_exactly_first_and_then_without_wrappers():
    """Equal names are the same tensor; what is left matches by its clean name, if only one does on each side."""
    assert match_names(["module.w", "w", "a._orig_mod.b"], ["w", "module.w", "a.b"]) == {
        "module.w": "module.w",
        "w": "w",
        "a._orig_mod.b": "a.b",
    }
    assert match_names(["module.w", "_orig_mod.w"], ["w"]) == {}
    assert match_names(["w", "x"], ["module.w", "y"]) == {"w": "module.w"}
