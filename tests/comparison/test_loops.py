"""The training loops of a comparison."""

import torch

from halfstep.backends.context import RunContext
from halfstep.comparison.loops import EngineLoop, make_loop
from halfstep.comparison.training_loop import build_parts
from halfstep.comparison.variant import parse_variants
from halfstep.jobs.builtin import digits_job

RUN = RunContext(batch_size=16)


def test_the_engine_loop_exposes_the_engine():
    """Scale, state tensors, outcome and truth table are the engine's."""
    job = digits_job()
    loop = make_loop(parse_variants(["fp16-lean"])[0], build_parts(job, RUN), 1.0)
    assert isinstance(loop, EngineLoop)
    batch = next(iter(job.call("data", RUN, split="train")))
    with loop.forward():
        loss = job.call("loss", RUN, model=loop.model, batch=batch)
    loop.backward(loss)
    assert loop.divisor() == 65536
    outcome = loop.step()()
    assert outcome.scale == 65536
    assert outcome.skipped or outcome.grad_norm > 0
    assert loop.truth()["rows"]["precision"] == "fp16-lean"
    assert sum(t.numel() for t in loop.state_tensors()) >= 3 * 26538  # two moments and the low bits
    with loop.evaluate():
        assert not torch.is_grad_enabled()
    loop.close()
