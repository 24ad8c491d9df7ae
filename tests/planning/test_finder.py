"""The batch finder: from a guess to a confirmed batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.hardware.probe import find_gpu
from halfstep.planning.finder import find_batch_size, search
from planning_jobs import small_job


@given(st.integers(1, 5000), st.floats(0.7, 1.3))
def test_search_ends_near_the_largest_that_fits(true, off):
    """From a guess up to 30 % wrong, the answer fits and is within a sixteenth of the largest, in few trials."""
    start = max(1, round(true * off))
    found, trials = search(start, lambda size: size <= true)
    assert found <= true
    assert found >= true - max(2, start // 16) or len(trials) >= 8
    assert len(trials) <= 20


def test_search_gives_up_at_zero():
    """If nothing fits, the answer is 0 and one example was tried."""
    found, trials = search(40, lambda _: False)
    assert found == 0
    assert trials[-1] == (1, False)


def test_given_memory_needs_no_gpu():
    """With a memory size the plan answers, and says that no trial was made."""
    found = find_batch_size(small_job(), "bf16", memory="1GiB")
    assert found.batch > 1000
    assert not found.confirmed


def test_without_gpu_or_memory_it_says_what_to_give(monkeypatch):
    """Without a GPU the error names the way out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="memory='80GiB'"):
        find_batch_size(small_job(), "bf16")


def test_memory_too_small_is_explained():
    """Where not one example fits, the error has both numbers."""
    from torch import nn

    wide = small_job(model=lambda: nn.Sequential(nn.Linear(16, 1 << 22), nn.Linear(1 << 22, 4)))
    with pytest.raises(SettingError, match="Not even one example"):
        find_batch_size(wide, "fp32", memory="1GiB")


def test_model_and_random_numbers_are_untouched():
    """A job that hands out one module keeps it as it was, and so do the random numbers."""
    model = torch.nn.Linear(16, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    numbers = torch.get_rng_state()
    find_batch_size(small_job(model=lambda: torch.nn.Linear(16, 4)), "bf16-lean", memory="1GiB")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state())


def test_running_out_of_memory_is_an_answer(monkeypatch):
    """Trials that run out of memory lower the batch, and the search ends with one that fitted."""
    tried = []

    def measure(_job, _policy, batch, _options):
        tried.append(batch)
        if batch > 900:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 20, 80 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("halfstep.planning.finder.probe", lambda: find_gpu("A100"))
    monkeypatch.setattr("halfstep.planning.finder.measure_step", measure)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = find_batch_size(small_job(), "bf16")
    assert found.confirmed
    assert found.batch <= 900 < max(tried)
    assert dict(found.trials)[found.batch]


def test_data_with_a_size_of_its_own_has_no_largest():
    """Where the data takes no notice of the size, the error says what to change, and no number is made up."""
    own = [(torch.randn(12, 16), torch.randint(4, (12,)))]
    with pytest.raises(SettingError, match="takes no notice of batch_size"):
        find_batch_size(small_job(data=lambda: own), "bf16", memory="1GiB")
