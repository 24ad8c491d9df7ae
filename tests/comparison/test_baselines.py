"""The same job in other people's loops, and in ours."""

import pytest
import torch

from halfstep.backends.context import RunContext
from halfstep.comparison.loops import make_loop
from halfstep.comparison.training_loop import build_parts
from halfstep.comparison.variant import parse_variants
from halfstep.errors import MissingError
from halfstep.jobs.builtin import digits_job

RUN = RunContext(batch_size=16)


def train(text, steps=4, max_norm=1.0, peer=True):
    (variant,) = parse_variants([], [text]) if peer else parse_variants([text])
    job = digits_job()
    torch.manual_seed(0)
    loop = make_loop(variant, build_parts(job, RUN), max_norm)
    data = iter(job.call("data", RUN, split="train"))
    losses, outcomes = [], []
    for _ in range(steps):
        with loop.forward():
            loss = job.call("loss", RUN, model=loop.model, batch=next(data))
        loop.backward(loss)
        outcomes.append(loop.step())
        losses.append(loss.item())
    return losses, [read() for read in outcomes], loop


def test_torch_amp_in_fp32_is_the_engine_in_fp32():
    """With nothing to cast or scale, both loops are the same training."""
    theirs, their_outcomes, _ = train("torch-amp:fp32")
    ours, our_outcomes, _ = train("fp32", peer=False)
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert [o.grad_norm for o in their_outcomes] == pytest.approx([o.grad_norm for o in our_outcomes], rel=1e-4)


def test_torch_amp_bf16_learns_as_ours_does():
    """The same batches, nearly the same losses; no scale, no skips."""
    theirs, outcomes, loop = train("torch-amp")
    ours, _, _ = train("bf16", peer=False)
    assert theirs == pytest.approx(ours, rel=0.02)
    assert all(o.scale is None and not o.skipped for o in outcomes)
    truth = loop.truth()
    assert truth["bytes_per_parameter"] == 16
    assert truth["rows"]["gradients"] == "fp32"
    assert loop.divisor() == 1
    loop.close()


def test_torch_amp_fp16_has_torchs_scaler():
    """Scale 65536, halved on a skip; without clipping no norm is taken."""
    _, outcomes, loop = train("torch-amp:fp16", max_norm=None)
    assert outcomes[0].scale == 65536
    assert all(o.grad_norm is None for o in outcomes)
    assert loop.divisor() == 65536 / 2 ** sum(o.skipped for o in outcomes)
    with loop.evaluate():
        assert not loop.model.training
        assert not torch.is_grad_enabled()
    assert loop.model.training


@pytest.mark.parametrize("peer", ["accelerate", "fabric"])
def test_an_installed_peer_trains_and_a_missing_one_says_how_to_install_it(peer, monkeypatch):
    """One of the two holds on every machine."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it on import; this puts it back
    module = {"accelerate": "accelerate", "fabric": "lightning.fabric"}[peer]
    try:
        __import__(module)
    except ImportError:
        with pytest.raises(MissingError, match="pip install"):
            train(peer)
    else:
        theirs, _, loop = train(peer)
        ours, _, _ = train("bf16", peer=False)
        assert theirs == pytest.approx(ours, rel=0.05)
        assert loop.truth()["rows"]["gradients"] == "fp32"
