"""The examiner of skipped steps in a comparison."""

import pytest
import torch
import torch.nn.functional as F

from halfstep.comparison.numerics.examiner import SkipExaminer
from halfstep.engine.engine import Engine


def make(weight=1.0, watch=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.mul_(weight)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16,loss_scale=8", watch=watch)
    return model, engine


def train(model, engine, batches, *, replay=True):
    for x in batches:

        def compute(x=x):
            return F.mse_loss(model(x).float(), torch.ones(3, 2))

        with engine.forward():
            loss = compute()
        engine.backward(loss)
        engine.step(replay=compute if replay else None)


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def test_only_steps_in_between_are_examined(x):
    """Skipped steps before it is switched on and after it is switched off have no cause, those in between have."""
    examiner = SkipExaminer()
    model, engine = make(1e6, examiner)
    train(model, engine, [x], replay=False)
    examiner.switch(on=True)
    train(model, engine, [x])
    examiner.switch(on=False)
    train(model, engine, [x], replay=False)
    (cause,) = examiner.causes
    assert (cause.step, cause.cause, cause.module, cause.scale_too_high) == (2, "forward", "0", False)
    assert examiner.seconds > 0
    engine.close()


def test_a_run_that_skips_for_ever_is_examined_three_times(x):
    """Until it is switched on again."""
    examiner = SkipExaminer()
    model, engine = make(1e6, examiner)
    for expected in (3, 6):
        examiner.switch(on=True)
        train(model, engine, [x] * 5)
        examiner.switch(on=False)
        assert len(examiner.causes) == expected
    engine.close()


def test_training_is_the_same_with_and_without_it(x):
    """Weights after a skipped step and healthy ones are bit-identical."""
    bad = x.clone()
    bad[1, 2] = float("nan")
    examiner = SkipExaminer()
    weights = []
    for watch in (examiner, None):
        model, engine = make(watch=watch)
        if watch is not None:
            watch.switch(on=True)
        train(model, engine, [x, bad, x], replay=watch is not None)
        weights.append(model[0].weight.detach().clone())
        engine.close()
    assert torch.equal(*weights)
    assert [(cause.step, cause.cause) for cause in examiner.causes] == [(2, "data")]


def test_batches_are_not_kept_alive(x):
    """Once it is switched off, nothing refers to the functions that compute steps again."""
    examiner = SkipExaminer()
    model, engine = make(watch=examiner)
    examiner.switch(on=True)
    train(model, engine, [x] * 2)
    examiner.switch(on=False)
    assert not engine.replays._steps
    engine.close()
