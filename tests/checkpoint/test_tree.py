import enum
import json
import random
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.optim import lr_scheduler

from halfstep.checkpoint.tree import tree_from_json, tree_to_json
from halfstep.errors import SettingError
from tree_cases import TREES, same


def through_json(tree):
    """The tree after conversion to JSON text and back; tensors are copied directly."""
    node, tensors = tree_to_json(tree)
    text = json.dumps(node, allow_nan=False)
    text.encode("ascii")
    return tree_from_json(json.loads(text), lambda name, _: tensors[name].detach().clone())


@given(TREES)
def test_every_tree_round_trips_exactly(tree):
    """Types, order, keys, infinities and the bits of every number are restored from JSON."""
    assert same(through_json(tree), tree)


def test_dtypes_and_deques_round_trip():
    """Some optimizers have a dtype among their settings, or a deque of gradients in their state."""
    tree = {"dtype": torch.bfloat16, "past": deque([torch.ones(2), 1], maxlen=3), "open": deque()}
    back = through_json(tree)
    assert back["dtype"] is torch.bfloat16
    assert [q.maxlen for q in (back["past"], back["open"])] == [3, None]
    assert same([*back["past"]], [*tree["past"]])
    with pytest.raises(SettingError, match="dtype 'Tensor'"):
        tree_from_json({"$dtype": "Tensor"}, lambda *_: None)


def test_a_shared_tensor_stays_shared():
    """A tensor that occurs twice is stored once and shared again after loading."""
    x = torch.arange(3.0)
    node, tensors = tree_to_json({"a": x, "b": [x, x[:2]]})
    assert len(tensors) == 2
    back = tree_from_json(node, lambda name, _: tensors[name].clone())
    assert back["a"] is back["b"][0]
    assert back["b"][1].tolist() == [0.0, 1.0]


def test_equal_paths_get_different_names():
    """A key with a dot is not confused with a path, and no tensor gets the name of the header's metadata."""
    tree = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2)}
    node, tensors = tree_to_json(tree)
    assert len(tensors) == 3
    assert "__metadata__" not in tensors
    assert same(tree_from_json(node, lambda name, _: tensors[name]), tree)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_optimizer_states_round_trip(make):
    """The state of torch's optimizers, integer keys included, is restored and loads."""
    params = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = make(params, lr=0.1)
    sum((p * p).sum() for p in params).backward()
    optimizer.step()
    back = through_json(optimizer.state_dict())
    assert same(back, optimizer.state_dict())
    make(params, lr=0.2).load_state_dict(back)


def test_scheduler_states_round_trip():
    """Counters, infinities and nested schedulers are restored exactly."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedulers = [
        lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
        ),
        lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    for scheduler in schedulers:
        assert same(through_json(scheduler.state_dict()), scheduler.state_dict())


def test_random_generators_continue_from_a_restored_state():
    """Python's, NumPy's (both kinds) and torch's generators repeat their numbers from the restored state."""
    rng = np.random.default_rng(7)
    old = np.random.RandomState(7)
    state = through_json((random.getstate(), rng.bit_generator.state, old.get_state(), torch.get_rng_state()))
    first = (random.random(), rng.random(), old.rand(), torch.rand(1).item())
    random.setstate(state[0])
    rng.bit_generator.state = state[1]
    old.set_state(state[2])
    torch.set_rng_state(state[3])
    assert (random.random(), rng.random(), old.rand(), torch.rand(1).item()) == first


class Colour(enum.IntEnum):
    """A subclass of int."""

    RED = 1


class Point(NamedTuple):
    """A subclass of tuple."""

    x: int
    y: int


@pytest.mark.parametrize(
    "value",
    [
        lambda: 0, object(), {1, 2}, Colour.RED, Point(1, 2), defaultdict(list), torch.device("cpu"), torch.Size([1]), 1j,
        bytearray(b"x"), np.array(["a"]), np.array([1.0], dtype=">f8"), np.longdouble(1), np.datetime64("2020-01-01"),
        torch.ones(2).to_sparse(), torch.ones(1, device="meta"), torch.nn.parameter.UninitializedParameter(),
        torch.empty(2, dtype=torch.bits8) if hasattr(torch, "bits8") else object(),
    ],
)  # fmt: skip
def test_values_that_cannot_be_stored_are_rejected_by_path(value):
    """The error contains the path of the value in the tree."""
    with pytest.raises(SettingError, match=r"^state\.optimizer\.0\.thing .*cannot store"):
        tree_to_json({"optimizer": [{"thing": value}]})


def test_a_key_that_cannot_be_stored_is_rejected():
    """Keys are checked like values."""
    with pytest.raises(SettingError, match=r"state\.a has the key .* of type Colour"):
        tree_to_json({"a": {Colour.RED: 1}})
    with pytest.raises(SettingError, match=r"state\.a\.key\.0 is a .*frozenset"):
        tree_to_json({"a": {(frozenset(),): 1}})


def test_a_tree_that_contains_itself_is_rejected():
    """A cycle raises an error instead of overflowing the stack."""
    tree = {}
    tree["again"] = [tree]
    with pytest.raises(SettingError, match="contains itself"):
        tree_to_json(tree)


def test_an_unknown_tag_is_rejected():
    """A kind of entry that a newer version may add is not read as data."""
    with pytest.raises(SettingError, match=r"unknown kind '\$set'"):
        tree_from_json({"a": {"$set": [1]}}, lambda *_: None)


def test_the_device_type_is_stored():
    """The device type of a tensor that was not on the CPU is stored and passed to the loader."""
    calls = []
    tree_from_json({"a": {"$tensor": "a", "on": "cuda"}, "b": {"$tensor": "b"}}, lambda *args: calls.append(args))
    assert calls == [("a", "cuda"), ("b", "cpu")]


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_marked():
    """The JSON form of a GPU tensor has its device type."""
    assert tree_to_json([torch.ones(1, device="cuda")])[0] == [{"$tensor": "0", "on": "cuda"}]
