"""Watch in an Engine: samples of true values, judged without changing or delaying the run."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from engine_models import Net, batches, build, snapshot, train_step
from gpu_sync import no_synchronisation
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.kernels.exponents import BIN_OF_1
from halfstep.watching.sampler import is_due

PRESETS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean", "bf16-lean,master=fp32")
OPTIONS = ({}, {"accumulate": 2}, {"max_norm": 0.1}, {"ema": 0.9}, {"recompute": "cheap"})


class Blocks(nn.Module):
    """Repeated blocks, so that they can be recomputed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def exponents(tensor):
    """How many finite elements other than 0 each power of two has, in float64."""
    values = tensor.detach().double().abs().flatten()
    values = values[values.isfinite() & (values > 0)]
    found = {}
    for value in values.tolist():
        exponent = math.frexp(value)[1] - 1
        found[exponent] = found.get(exponent, 0) + 1
    return found


def counted(stats):
    """The same of a TensorStats."""
    return {i - BIN_OF_1: n for i, n in enumerate(stats.bins) if n}


class Reference:
    """A watch that stores what a Watch must count."""

    def __init__(self, inner):
        self.inner, self.gradients = inner, {}

    def attach(self, engine):
        self.engine = engine
        self.inner.attach(engine)

    def before_step(self, gradients, divisor):
        step = self.engine.progress.attempts + 1
        true = {n: g.double() / divisor.double() for n, g in gradients.items()}
        self.gradients[step] = true, {n: p.detach().clone() for n, p in self.engine.params.items()}
        self.inner.before_step(gradients, divisor)

    def after_step(self, result):
        self.inner.after_step(result)

    def delivered(self, result):
        self.inner.delivered(result)

    def close(self):
        self.inner.close()


def test_the_schedule_is_dense_at_first():
    """Powers of two up to 64, then every N steps."""
    assert [s for s in range(1, 320) if is_due(s, 100)] == [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
    assert all(is_due(s, 1) for s in range(1, 50))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("precision", ["fp16", "bf16-lean", "fp16-lean"])
def test_counts_are_those_of_the_unscaled_gradients_and_the_stored_weights(precision, options):
    """Every bin equals a float64 reference: whatever the loss scale, accumulation, clipping and preset."""
    watch = halfstep.Watch(every=3)
    reference = Reference(watch)
    model = Blocks() if "recompute" in options else None
    model, _, engine = build(precision, model=model, watch=reference, schedule=False, **options)
    for batch in batches(6 * options.get("accumulate", 1)):
        train_step(model, engine, batch)
    engine.close()
    assert [s.step for s in watch.samples] == [1, 2, 3, 4, 6]
    for sample in watch.samples:
        gradients, weights = reference.gradients[sample.step]
        assert {n: counted(s) for n, s in sample.gradients.items()} == {n: exponents(g) for n, g in gradients.items()}
        assert {n: counted(s) for n, s in sample.weights.items()} == {n: exponents(w) for n, w in weights.items()}
        name = next(iter(gradients))
        assert sample.gradients[name].largest == pytest.approx(gradients[name].abs().max().item(), rel=1e-6)


@pytest.mark.parametrize("release", [False, True], ids=["", "release"])
@pytest.mark.parametrize("precision", PRESETS)
def test_a_watched_run_is_bit_identical(precision, release):
    """Watching, activations included, changes no weight, state or random number."""
    if release and precision.startswith("fp16"):
        pytest.skip("gradient release needs a preset without a loss scale")
    states = []
    for watch in (None, halfstep.Watch(every=1, activations=True)):
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 3))
        model, _, engine = build(precision, model=model, watch=watch, gradient_release=release, schedule=False)
        for i, batch in enumerate(batches(5)):
            train_step(model, engine, batch, poison=i == 2)
        states.append(snapshot(model, engine))
        engine.close()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        other = states[1][name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_gradient_release_is_watched():
    """Gradients that are dropped inside backward are counted as they arrive, and the update is compared around backward."""
    gradients = []
    for release in (False, True):
        watch = halfstep.Watch(every=1)
        model, _, engine = build("bf16-lean", watch=watch, gradient_release=release, schedule=False)
        for batch in batches(3):
            train_step(model, engine, batch)
        engine.close()
        assert all(s.updates["head.weight"].ratio > 1e-3 for s in watch.samples)
        gradients.append([{n: counted(s) for n, s in sample.gradients.items()} for sample in watch.samples])
    assert gradients[0] == gradients[1]
    assert len(gradients[0][0]) == 8


def test_a_skipped_step_is_a_sample_with_its_nonfinite_gradients():
    """The sample knows the outcome and how many elements were not finite; the update changed nothing."""
    watch = halfstep.Watch(every=1)
    model, _, engine = build("fp16", watch=watch, schedule=False)
    for i, batch in enumerate(batches(3)):
        train_step(model, engine, batch, poison=i == 1)
    engine.close()
    assert [s.skipped for s in watch.samples] == [False, True, False]
    sample = watch.samples[1]
    assert sample.gradients["inner.weight"].nonfinite > 0
    assert sample.updates["inner.weight"].ratio == 0
    (skip,) = [e for e in watch.events if e.kind == "skip"]
    assert skip.step == 2
    assert skip.data["parameters"]["inner.weight"] == sample.gradients["inner.weight"].nonfinite


def test_a_backoff_names_the_parameters_that_overflowed():
    """The event of a lower scale carries the gradients of the skips before it; a raise carries none."""
    events = []
    watch = halfstep.Watch(outlet=events.append)
    scaler = halfstep.LossScaler("torch", growth_interval=2)
    model, _, engine = build("fp16", watch=watch, scaler=scaler, schedule=False)
    for i, batch in enumerate(batches(6)):
        train_step(model, engine, batch, poison=i == 1)
    engine.close()
    assert events == list(watch.events)
    lowered, raised = [e for e in events if e.kind == "scale"]
    assert (lowered.step, lowered.data["before"], lowered.data["after"]) == (3, 65536.0, 32768.0)
    assert "head.weight" in lowered.data["parameters"]
    assert raised.data == {"before": 32768.0, "after": 65536.0, "parameters": {}}


def test_a_resumed_run_is_sampled_early_under_its_own_step_numbers(tmp_path):
    """Samples are counted from the attachment, and numbered by the Engine."""
    model, _, engine = build("fp32", schedule=False)
    for batch in batches(70):
        train_step(model, engine, batch)
    engine.save(tmp_path / "state")
    engine.close()
    watch = halfstep.Watch()
    model, _, engine = build("fp32", watch=watch, schedule=False)
    engine.load(tmp_path / "state")
    for batch in batches(4):
        train_step(model, engine, batch)
    engine.close()
    assert [s.step for s in watch.samples] == [71, 72, 74]


def test_the_state_of_a_watch_fits_its_optimizers():
    """It can be stored as JSON, and one of another number of optimizers is rejected."""
    watch = halfstep.Watch()
    _, _, engine = build("fp16", watch=watch)
    state = json.loads(json.dumps(watch.state_dict()))
    watch.load_state_dict(state)
    with pytest.raises(SettingError, match="attached to 0"):
        halfstep.Watch().load_state_dict(state)
    engine.close()


@pytest.mark.parametrize("activations", [False, True])
def test_a_skipped_step_is_examined_and_its_replay_not_counted(activations):
    """The autopsy is an event, and activations of the replay are in no sample."""
    watch = halfstep.Watch(every=1, activations=activations)
    model, _, engine = build("fp32", watch=watch, schedule=False)
    for i, (x, y) in enumerate(batches(3)):
        if i == 1:
            x[0, 0] = math.nan

        def compute(x=x, y=y):
            return nn.functional.cross_entropy(model(x), y)

        with engine.forward():
            loss = compute()
        engine.backward(loss)
        engine.step(replay=compute)
    engine.close()
    (autopsy,) = watch.autopsies
    assert (autopsy.step, autopsy.cause) == (2, "data")
    assert [e.kind for e in watch.events] == ["skip", "autopsy"]
    assert watch.events[1].data["cause"] == "data"
    if activations:
        assert {s.activations["head"].numel for s in watch.samples} == {24}


def test_a_loop_without_replays_gets_no_autopsies():
    """Skips of a loop that passes no function are events, and one line of the log shows how to have them examined."""
    watch = halfstep.Watch()
    model, _, engine = build("fp32", watch=watch, schedule=False)
    for batch in batches(3):
        train_step(model, engine, batch, poison=True)
    engine.close()
    assert [e.kind for e in watch.events] == ["skip"] * 3
    assert not watch.autopsies


class NoHostRead(TorchDispatchMode):
    """Raises where the host reads a value of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host read a tensor"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_taking_a_sample_reads_nothing(precision):
    """No value of a tensor is read by the host before a sample has arrived."""
    watch = halfstep.Watch(every=1, activations=True)
    model, _, engine = build(precision, watch=watch, schedule=False)
    (stream,) = watch._streams
    before, after = stream.before, stream.after

    def guarded(function):
        def call(*args):
            with NoHostRead():
                return function(*args)

        return call

    stream.before, stream.after = guarded(before), guarded(after)
    for batch in batches(3):
        train_step(model, engine, batch)
    engine.close()
    assert len(watch.samples) == 3


def test_the_cost_is_reported():
    """Number of samples, seconds of each and their share of the time."""
    watch = halfstep.Watch(every=2)
    model, _, engine = build("fp32", watch=watch, schedule=False)
    for batch in batches(5):
        train_step(model, engine, batch)
    engine.close()
    assert watch.cost.samples == 3
    assert watch.cost.seconds_per_sample > 0
    assert 0 < watch.cost.share <= 1


def test_the_report_lists_the_worst_parameter_first():
    """Non-finite gradients come before anything else, and the table names the largest values."""
    watch = halfstep.Watch(every=1, activations=True)
    assert str(watch.report()) == "Watch: no sample has arrived yet."
    model, _, engine = build("fp32", watch=watch, schedule=False)
    engine.params["batch.bias"].register_hook(lambda g: g * math.nan)
    for batch in batches(2):
        train_step(model, engine, batch)
    engine.close()
    report = watch.report()
    assert report.rows[0].name == "batch.bias"
    assert {s.name for s in report.activations} == {"inner", "norm", "batch", "head"}
    text = str(report)
    assert text.splitlines()[2].startswith("batch.bias")
    assert "Events: skip 2" in text


def test_what_is_not_requested_is_not_counted():
    """gradients=False and weights=False leave their tables empty; updates are always there."""
    watch = halfstep.Watch(every=1, gradients=False, weights=False)
    model, _, engine = build("fp32", watch=watch, schedule=False)
    train_step(model, engine, batches(1)[0])
    engine.close()
    (sample,) = watch.samples
    assert not sample.gradients
    assert not sample.weights
    assert len(sample.updates) == 8


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_an_invalid_interval_is_rejected(every):
    """Only whole numbers of steps."""
    with pytest.raises(SettingError, match="every="):
        halfstep.Watch(every=every)


def test_a_watch_belongs_to_one_engine_and_its_model():
    """A second Engine, and another model than the Engine's, are rejected."""
    watch = halfstep.Watch()
    _, _, engine = build("fp32", watch=watch)
    with pytest.raises(SettingError, match="attached already"):
        build("fp32", watch=watch)
    with pytest.raises(SettingError, match="another model"):
        build("fp32", watch=halfstep.Watch(Net()))
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-lean", "fp16-lean"])
def test_no_step_waits_for_the_gpu(precision):
    """torch's sync debugger raises nowhere in a watched step, sampled or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    watch = halfstep.Watch(every=2, activations=True)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision, watch=watch)
    x = torch.randn(16, 64, device="cuda")
    for step in range(12):
        with engine.forward():
            loss = model(x).square().mean()
        engine.backward(loss)
        if step < 4:
            engine.step()
            continue
        torch.cuda.synchronize()
        with no_synchronisation():
            engine.step()
    engine.close()
    assert [s.step for s in watch.samples][-3:] == [8, 10, 12]
    assert watch.samples[-1].activations.keys() == {"0", "1", "2"}
