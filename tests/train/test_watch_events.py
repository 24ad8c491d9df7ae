"""Events of real runs: each fault has its event and no other, with advice; a healthy run has none; a resumed run has the same."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from halfstep.checkpoint.runlog import read_runlog
from halfstep.errors import SettingError
from halfstep.jobs.job import Job
from halfstep.report.topics import TOPICS
from halfstep.train import TrainConfig, train
from halfstep.train.stream import fingerprint
from halfstep.watching import causes, events, losses

KINDS = {"skip", "scale", "autopsy", "nan-loss", "loss-spike", "lost-updates", "drift", "no-activations"}
BATCH, NUM = 8, 64  # 8 steps in an epoch
BAD = 37  # the sample that is ruined


def samples(factor=1.0):
    """A problem that a small model learns; one sample is multiplied."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(NUM, 6, generator=g)
    y = (x @ torch.randn(6, 3, generator=g)).argmax(-1)
    x[BAD] *= factor
    return TensorDataset(x, y)


def classifier(**changed):
    """A job over a shuffled DataLoader."""
    fields = {
        "model": lambda: torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)),
        "data": lambda batch_size: DataLoader(samples(), batch_size, shuffle=True),
        "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=3e-3),
    }
    return Job(**(fields | changed))


def run(out, job, precision="fp32", resume=False, **config):
    """The Watch's events of a run, as they are in its file."""
    settings = {"batch": BATCH, "watch": 4, "save_every": 1000, "device": "cpu"} | config
    train(job, TrainConfig(**settings), precision=precision, out=out, resume=resume)
    return [e for e in read_runlog(out / "run.jsonl").events if e["event"] in KINDS]


def kinds(reported):
    return {event["event"] for event in reported}


def contents(reported):
    return [(event["step"], event["message"], event["data"]) for event in reported]


# --- each fault -----------------------------------------------------------------------------------------------------------


def overflowing(model, batch, epoch):
    """Finite losses whose gradients overflow fp16 in the second epoch, at a loss scale of 65536."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss + 0.0 * loss if epoch != 1 else loss + 1e4 * (loss - loss.detach())


def test_skips_and_the_scale_name_the_parameters(tmp_path):
    """Gradients that overflow at this scale: skips, an autopsy that blames the scale, and a scale lowered for these parameters."""
    reported = run(tmp_path, classifier(loss=overflowing), "fp16", steps=12)
    assert kinds(reported) == {"skip", "autopsy", "scale"}
    skips = [e for e in reported if e["event"] == "skip"]
    assert skips[0]["step"] == 9
    assert skips[0]["data"]["parameters"]
    lowered = next(e for e in reported if e["event"] == "scale")
    assert lowered["data"]["after"] < lowered["data"]["before"] == 65536
    assert set(lowered["data"]["parameters"]) >= set(skips[0]["data"]["parameters"])
    assert "normal" in lowered["advice"]
    autopsy = next(e for e in reported if e["event"] == "autopsy")
    assert (autopsy["data"]["cause"], autopsy["data"]["at_scale_1"]) == ("backward", True)


@pytest.mark.parametrize("stop", [9, 10, 11])
def test_skips_and_scales_are_the_same_after_a_resume(stop, tmp_path):
    """The run stops around the backoff: the scale before it, its parameters and the skips in a row are remembered."""
    job = classifier(loss=overflowing)
    plain = run(tmp_path / "plain", job, "fp16", steps=13)
    run(tmp_path / "run", job, "fp16", steps=stop)
    resumed = run(tmp_path / "run", job, "fp16", steps=13, resume=True)
    outcomes = [[e for e in events if e["event"] in {"skip", "scale"}] for events in (plain, resumed)]
    assert contents(outcomes[0]) == contents(outcomes[1])
    assert kinds(outcomes[0]) == {"skip", "scale"}


def test_a_nan_loss_names_its_batch(tmp_path):
    """One NaN sample: its batch is identified by epoch, index, samples and hash, and the scale is not blamed."""
    reported = run(tmp_path, classifier(data=lambda batch_size: DataLoader(samples(math.nan), batch_size)), epochs=1)
    assert kinds(reported) == {"nan-loss", "skip", "autopsy"}
    nan = next(e for e in reported if e["event"] == "nan-loss")
    batch = list(DataLoader(samples(math.nan), BATCH))[BAD // BATCH]
    first = BAD // BATCH * BATCH
    assert nan["data"]["batch"] == [
        {
            "epoch": 0,
            "index": BAD // BATCH,
            "hash": fingerprint(batch)[:12],
            "samples": list(range(first, first + BATCH)),
        }
    ]
    assert f"batch {BAD // BATCH} of epoch 0" in nan["message"]
    assert "no loss scale" in next(e for e in reported if e["event"] == "skip")["advice"]


def test_lost_updates_are_reported(tmp_path):
    """bf16 weights without a master and a small learning rate."""
    job = classifier(optimizer=lambda params: torch.optim.SGD(params, lr=1e-7))
    reported = run(tmp_path, job, "bf16-lean,master=none", steps=40)
    assert kinds(reported) == {"lost-updates"}
    assert "0.weight" in reported[0]["data"]["parameters"]
    assert "fp32 masters" in reported[0]["advice"]


def drifting():
    """A layer whose output grows by the same amount at each step."""
    return Job(
        model=lambda: torch.nn.Linear(4, 8, bias=False),
        data=lambda batch_size: [torch.full((batch_size, 4), 0.5)] * 40,
        loss=lambda model, batch: -model(batch).float().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=8000.0),
    )


def test_drift_is_reported(tmp_path):
    """Outputs in fp16 that grow towards 65504 are reported before they overflow."""
    reported = run(tmp_path, drifting(), "fp16", steps=33, max_norm=None, watch=100, watch_activations=True)
    assert kinds(reported) == {"drift"}
    assert 16376 < max(reported[0]["data"]["largest"].values()) < 65504
    assert "no loss scale" in reported[0]["advice"]


# --- loss spikes ----------------------------------------------------------------------------------------------------------

SPIKED = 8  # the epoch


def spiking(**changed):
    """In one epoch a sample is multiplied by -3000."""

    def data(batch_size, split, epoch):
        return DataLoader(samples(-3000.0 if epoch == SPIKED else 1.0), batch_size, shuffle=True)

    return classifier(
        data=data,
        model=lambda: torch.nn.Linear(6, 3),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
        **changed,
    )


@pytest.fixture(scope="module")
def spike(tmp_path_factory):
    """The events of a run with one ruined sample in one epoch."""
    return run(tmp_path_factory.mktemp("spike"), spiking(), epochs=10)


def test_a_loss_spike_leads_to_the_batch(spike):
    """Its samples contain the ruined one, and the batch of these samples has its hash."""
    (event,) = spike
    assert event["event"] == "loss-spike"
    (batch,) = event["data"]["batch"]
    assert batch["epoch"] == SPIKED
    assert event["step"] == SPIKED * NUM // BATCH + batch["index"] + 1
    assert BAD in batch["samples"]
    assert len(batch["samples"]) == BATCH
    x, y = samples(-3000.0)[batch["samples"]]
    assert fingerprint([x, y])[:12] == batch["hash"]
    assert "Look at this batch" in event["advice"]


def test_a_loss_spike_is_deterministic(spike, tmp_path):
    """Two runs have the same event."""
    again = run(tmp_path, spiking(), epochs=10)
    assert [(e["step"], e["message"], e["data"]) for e in again] == [
        (e["step"], e["message"], e["data"]) for e in spike
    ]


@pytest.mark.parametrize("after", [-30, -1, 0, 1])
def test_a_loss_spike_is_the_same_after_a_resume(spike, after, tmp_path):
    """The run stops some steps before or after the spike, also while it is not over; the events are those of one run."""
    stop = spike[0]["step"] + after
    run(tmp_path, spiking(), steps=stop)
    assert contents(run(tmp_path, spiking(), epochs=10, resume=True)) == contents(spike)


def test_under_accumulation_all_batches_of_the_step_are_named(tmp_path):
    """A step of two batches reports both, in order."""
    (event,) = run(tmp_path, spiking(), epochs=10, accumulate=2, batch=4)[:1]
    first, second = event["data"]["batch"]
    assert (first["epoch"], second["epoch"], second["index"]) == (SPIKED, SPIKED, first["index"] + 1)
    assert BAD in first["samples"] + second["samples"]


@pytest.mark.gpu
def test_on_a_gpu_the_spike_has_the_same_batch(spike, tmp_path):
    """The loss arrives a step later, when the batch still exists."""
    (event,) = run(tmp_path, spiking(), epochs=10, device="cuda")
    assert (event["step"], event["data"]["batch"]) == (spike[0]["step"], spike[0]["data"]["batch"])


# --- healthy runs ---------------------------------------------------------------------------------------------------------


def harder(model, batch, epoch):
    """A curriculum: label smoothing from epoch 8 on raises the loss."""
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.0 if epoch < 8 else 0.8)


def restarting(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 25)


def warming(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 30)


COURSES = {
    "plain": {},
    "noisy": {"loss": lambda model, batch: F.cross_entropy(model(batch[0] + 2 * torch.randn_like(batch[0])), batch[1])},
    "warm-up": {"scheduler": warming, "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2)},
    "curriculum": {"loss": harder},
    "restarts": {"scheduler": restarting, "optimizer": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9)},
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("course", COURSES)
def test_a_healthy_run_has_no_event(course, seed, tmp_path):
    """Twenty runs of 80 steps."""
    assert not run(tmp_path, classifier(**COURSES[course]), epochs=10, seed=seed, watch=20)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-lean", "fp16-lean"])
def test_a_healthy_run_in_16_bits_has_no_event(precision, tmp_path):
    """Activations included."""
    assert not run(tmp_path, classifier(), precision, steps=20, watch_activations=True)


# --- advice ---------------------------------------------------------------------------------------------------------------


def test_every_topic_that_an_advice_names_exists():
    """`halfstep explain TOPIC` works for each."""
    text = "".join(Path(module.__file__).read_text() for module in (causes, events, losses))
    topics = set(re.findall(r"halfstep explain ([a-z0-9-]+)", text))
    assert topics
    assert topics <= TOPICS.keys()


def test_activations_without_a_watch_are_rejected():
    """The setting would have no effect."""
    with pytest.raises(SettingError, match="watch_activations"):
        TrainConfig(watch=None, watch_activations=True)
