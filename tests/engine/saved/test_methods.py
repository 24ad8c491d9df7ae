"""Engine.save in the background: what is saved, who waits, and where errors appear."""

import os
import threading

import pytest
import torch
from torch import nn

from halfstep import Engine
from halfstep.backends.base import Backend
from halfstep.backends.context import RunContext
from halfstep.checkpoint.directory import load_checkpoint
from halfstep.errors import HalfstepError, SettingError


def build(precision, width=6, device="cpu", **options):
    """A small model with buffers, and an engine over it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)).to(device)
    return model, Engine(model, torch.optim.AdamW(model.parameters(), lr=0.1), precision, **options)


def step(model, engine):
    """One step on random data."""
    with engine.forward():
        loss = model(torch.randn(5, 4, device=engine.device)).float().square().mean()
    engine.backward(loss)
    engine.step()


def trees_equal(one, other):
    """Whether two trees have the same structure and bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(trees_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(trees_equal, one, other))
    return one == other


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean,states=8bit", "fp16-lean"])
def test_steps_after_the_call_change_nothing_that_is_saved(precision, tmp_path, monkeypatch):
    """Weights, masters, moments, buffers, EMA and random-number state are bit for bit those of a save that waits."""
    model, engine = build(precision, ema=0.9)
    with engine:
        for _ in range(2):
            step(model, engine)
        engine.save(tmp_path / "waits", epoch=1)
        released, real = threading.Event(), os.fsync

        def slow(handle):
            assert threading.current_thread() is threading.main_thread() or released.wait(60)
            real(handle)

        monkeypatch.setattr(os, "fsync", slow)
        engine.save(tmp_path / "background", wait=False, epoch=1)
        for _ in range(2):
            step(model, engine)
        assert not (tmp_path / "background").exists()
        released.set()
        engine.finish_save()
        one, other = load_checkpoint(tmp_path / "waits"), load_checkpoint(tmp_path / "background")
        assert trees_equal(one.weights, other.weights)
        assert trees_equal(one.state, other.state)
        assert trees_equal(one.meta, other.meta)
        assert not trees_equal(one.weights, {name: tensor.detach() for name, tensor in model.state_dict().items()})
        assert engine.load(tmp_path / "background") == {"epoch": 1}
        assert trees_equal(other.weights, {name: tensor.detach() for name, tensor in model.state_dict().items()})


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "bf16-lean,states=8bit"])
def test_steps_on_a_gpu_after_the_call_change_nothing_that_is_saved(precision, tmp_path):
    """The device copies before it changes anything, also when its buffers are used again."""
    model, engine = build(precision, width=2**20, device="cuda", ema=0.9)
    with engine:
        for number in range(3):
            step(model, engine)
            engine.save(tmp_path / f"waits-{number}")
            engine.save(tmp_path / f"background-{number}", wait=False)
            for _ in range(3):
                step(model, engine)
    for number in range(3):
        one, other = (load_checkpoint(tmp_path / f"{kind}-{number}") for kind in ("waits", "background"))
        assert trees_equal(one.weights, other.weights)
        assert trees_equal(one.state, other.state)


def test_close_and_load_wait_for_the_save(tmp_path):
    """What was saved in the background can be loaded at once, and is on disk when the engine is closed."""
    model, engine = build("fp32")
    step(model, engine)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = engine.save(tmp_path / "a", wait=False)
    step(model, engine)
    engine.load(path)
    assert trees_equal(weights, dict(model.state_dict()))
    engine.save(tmp_path / "b", wait=False)
    engine.close()
    assert trees_equal(load_checkpoint(tmp_path / "b").weights, weights)


@pytest.mark.parametrize("call", ["save", "finish_save", "close"])
def test_an_error_in_the_background_is_raised_by_what_comes_next(call, tmp_path, monkeypatch):
    """By the next save, by finish_save or by close; the checkpoint before is intact, and the engine continues."""
    model, engine = build("fp32")
    step(model, engine)
    engine.save(tmp_path / "here")
    before = load_checkpoint(tmp_path / "here").weights
    step(model, engine)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        engine.save(tmp_path / "here", overwrite=True, wait=False)
        while engine.saver.busy:
            pass
    with pytest.raises(HalfstepError, match="No space left on device"):
        getattr(engine, call)(*([tmp_path / "next"] if call == "save" else []))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert trees_equal(load_checkpoint(tmp_path / "here").weights, before)
    if call != "close":
        step(model, engine)
        engine.save(tmp_path / "here", overwrite=True, wait=False)
        engine.close()
        assert not trees_equal(load_checkpoint(tmp_path / "here").weights, before)


def test_non_finite_weights_are_rejected_at_once(tmp_path):
    """They never replace a healthy checkpoint, in the background either, unless that is requested."""
    model, engine = build("fp32")
    with engine:
        engine.save(tmp_path / "here")
        with torch.no_grad():
            model[2].weight[0, 1] = float("nan")
        with pytest.raises(SettingError, match=r"2.weight \(1 of 6\)"):
            engine.save(tmp_path / "here", overwrite=True, wait=False)
        assert not engine.saver.busy
        assert bool(load_checkpoint(tmp_path / "here").weights["2.weight"].isfinite().all())
        engine.save(tmp_path / "odd", wait=False, allow_nonfinite=True)
    assert bool(load_checkpoint(tmp_path / "odd").weights["2.weight"].isnan().any())


def test_of_ranks_with_the_same_state_the_first_writes(tmp_path):
    """The others check their state and write nothing."""
    for rank in (1, 0):
        model = nn.Linear(2, 1)
        backend = Backend(RunContext(rank=rank, world_size=2))
        with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", backend=backend) as engine:
            assert engine.save(tmp_path / "here", wait=False) == tmp_path / "here"
            engine.finish_save()
            assert (tmp_path / "here").exists() == (rank == 0)
            with torch.no_grad():
                model.weight.fill_(float("inf"))
            with pytest.raises(SettingError, match="not finite"):
                engine.save(tmp_path / "other")
