"""One training step, whoever does it."""

import torch

from halfstep.backends.context import RunContext
from halfstep.comparison.contender import parse_contenders
from halfstep.comparison.loops import EngineLoop, build_parts, make_loop
from halfstep.jobs.builtin import digits_job

RUN = RunContext(batch_size=16)


def test_our_own_loop_is_the_engine_and_tells_its_state():
    """Scale, held tensors, outcome and the engine's truth table."""
    job = digits_job()
    loop = make_loop(parse_contenders(["fp16-lean"])[0], build_parts(job, RUN), 1.0)
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


def test_a_job_builds_its_parts_on_the_device():
    """Model, optimizer over its parameters, scheduler over that."""
    parts = build_parts(digits_job(), RUN)
    assert {p.device.type for p in parts.model.parameters()} == {"cpu"}
    assert parts.scheduler.optimizer is parts.optimizer
