"""The batch finder: from a guess to a confirmed batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.hardware.probe import find_gpu
from halfstep.planning.finder import find_batch_size, search
from halfstep.report.plan import batch_text
from planning_jobs import residual, small_job


@given(st.integers(1, 5000), st.floats(0.7, 1.3))
def test_search_ends_near_the_largest_that_fits(true, off):
    """From a guess up to 30 % off, the answer fits and is within 1/16 of the largest, in few trials."""
    start = max(1, round(true * off))
    batch, trials = search(start, lambda size: size <= true)
    assert batch <= true
    assert batch >= true - max(2, start // 16) or len(trials) >= 8
    assert len(trials) <= 20


def test_search_gives_up_at_zero():
    """If nothing fits, the answer is 0 and one example was tried."""
    batch, trials = search(40, lambda _: False)
    assert batch == 0
    assert trials[-1] == (1, False)


def test_memory_size_needs_no_gpu():
    """With a memory size the batch is predicted, and not confirmed by trial."""
    result = find_batch_size(small_job(), "bf16", memory="1GiB")
    assert result.batch > 1000
    assert not result.confirmed


def test_without_gpu_or_memory_the_error_names_the_argument(monkeypatch):
    """Without a GPU the error names the argument to pass."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="memory='80GiB'"):
        find_batch_size(small_job(), "bf16")


def test_memory_too_small_is_explained():
    """If not even one example fits, the error has the needed and the usable size."""
    from torch import nn

    wide = small_job(model=lambda: nn.Sequential(nn.Linear(16, 1 << 22), nn.Linear(1 << 22, 4)))
    with pytest.raises(SettingError, match="Not even one example"):
        find_batch_size(wide, "fp32", memory="1GiB")


def test_model_and_random_numbers_are_untouched():
    """Finding a batch changes neither the job's module nor the random number state."""
    model = torch.nn.Linear(16, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    find_batch_size(small_job(model=lambda: torch.nn.Linear(16, 4)), "bf16-lean", memory="1GiB")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


def test_running_out_of_memory_lowers_the_batch(monkeypatch):
    """Trials that run out of memory lower the batch, and the search ends with one that fits."""
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
    result = find_batch_size(small_job(), "bf16")
    assert result.confirmed
    assert result.batch <= 900 < max(tried)
    assert dict(result.trials)[result.batch]


def test_data_with_a_fixed_batch_size_has_no_largest():
    """If the data ignores the size, the error explains what to change."""
    fixed = [(torch.randn(12, 16), torch.randint(4, (12,)))]
    with pytest.raises(SettingError, match="ignores batch_size"):
        find_batch_size(small_job(data=lambda: fixed), "bf16", memory="1GiB")


def test_recompute_is_a_further_answer():
    """A model with repeated blocks also gets the larger batch that recompute="cheap" allows."""
    result = find_batch_size(small_job(model=lambda: residual(2, 32)), "bf16-lean", memory="700MiB")
    assert result.recomputed.batch > result.batch
    assert f"with recompute=cheap: {result.recomputed.batch}" in batch_text(result)


def test_model_without_blocks_has_no_further_answer():
    """Without repeated blocks there is nothing to recompute, and the batch is found all the same."""
    assert find_batch_size(small_job(), "bf16", memory="1GiB").recomputed is None
