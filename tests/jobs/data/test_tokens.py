import pytest
import torch

from halfstep.errors import SettingError
from halfstep.jobs.data.tokens import Draw, SyntheticInputs


def draw(seed=0):
    return Draw(torch.Generator().manual_seed(seed), torch.device("cpu"))


def make(source, rows):
    return {"input_ids": source.tokens(50, rows, 16), "values": source.normal(rows, 3)}


def batches(**options):
    return list(SyntheticInputs(make, "test", options.pop("split", "val"), 2, **options))


def same(left, right):
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(left, right, strict=True)
    )


def test_half_of_the_tokens_are_successors():
    """About half of the tokens are the id after the one before them, so they can be predicted."""
    tokens = draw().tokens(1000, 64, 128)
    share = (tokens[:, 1:] == (tokens[:, :-1] + 1) % 1000).float().mean().item()
    assert 0.47 < share < 0.55


def test_low_ids_are_frequent_and_all_ids_are_in_range():
    """Ids follow Zipf's law below the given number."""
    tokens = draw().tokens(100, 64, 128)
    counts = tokens.flatten().bincount(minlength=100)
    assert len(counts) == 100
    assert counts[:10].sum() > 3 * counts[50:60].sum() > 0


def test_a_shift_rotates_the_ids_of_a_row():
    """The same random numbers with a shift are the same sequence of other ids."""
    plain, shifted = draw().tokens(40, 2, 20), draw().tokens(40, 2, 20, shift=torch.tensor([0, 10]))
    assert torch.equal(plain[0], shifted[0])
    assert torch.equal((plain[1] + 10) % 40, shifted[1])


def test_batches_depend_on_seed_split_epoch_and_rank_only():
    """The same position has the same batches, and every other position has different ones."""
    reference = batches()
    assert same(reference, batches())
    for other in ({"seed": 1}, {"epoch": 1}, {"rank": 1, "world_size": 2}):
        assert not torch.equal(reference[0]["values"], batches(**other)[0]["values"]), other
    train = SyntheticInputs(make, "test", "train", 2)
    assert not torch.equal(reference[0]["values"], next(iter(train))["values"])
    assert (len(train), len(reference)) == (100, 10)


def test_a_saved_position_continues_with_the_following_batches():
    """Batches after a restored position equal those of the uninterrupted epoch."""
    loader = SyntheticInputs(make, "test", "val", 2)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    restored = SyntheticInputs(make, "test", "val", 2)
    restored.load_state_dict(loader.state_dict())
    assert same(list(restored), list(iterator))


def test_a_position_of_other_batches_is_rejected():
    """A position that was saved with other sizes raises an error that names them."""
    state = SyntheticInputs(make, "64 tokens", "val", 2).state_dict()
    with pytest.raises(SettingError, match="kind='64 tokens', but kind is now '32 tokens'"):
        SyntheticInputs(make, "32 tokens", "val", 2).load_state_dict(state)


def test_the_meta_device_has_shapes():
    """On the meta device batches have shapes and no values."""
    batch = next(iter(SyntheticInputs(make, "test", "train", 3, device="meta")))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"input_ids": (3, 16), "values": (3, 3)}
    assert {value.device.type for value in batch.values()} == {"meta"}
