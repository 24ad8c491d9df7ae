"""Each scheduler is stepped once per applied update, or with its metric, and by nobody else."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from halfstep.engine.engine import Engine
from halfstep.engine.schedules import Schedules
from halfstep.errors import SettingError


class UpdateScheduler:
    """timm's protocol: step(epoch) once per epoch, step_update(num_updates) once per update."""

    def __init__(self, optimizer, t_in_epochs=False):
        self.optimizer, self.t_in_epochs, self.numbers = optimizer, t_in_epochs, []

    def step(self, epoch, metric=None):
        raise AssertionError("the Engine does not know the epoch")

    def step_update(self, num_updates, metric=None):
        self.numbers.append(num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0 / (1 + num_updates)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class EpochScheduler:
    """A scheduler whose step() cannot be called without an epoch."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch):
        pass


def engine_of(make, precision="fp32", **options):
    """A linear model, the scheduler that `make` builds, and an Engine."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = make(optimizer)
    return model, scheduler, Engine(model, optimizer, precision, scheduler=scheduler, **options)


def train(model, engine, *, poison=False):
    """One micro-batch."""
    with engine.forward():
        loss = model(torch.ones(2, 4)).float().mean() * (float("inf") if poison else 1.0)
    engine.backward(loss)
    return engine.step()


FACTORIES = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=50),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_scheduler_step_left_in_the_loop_is_rejected(kind):
    """The next engine.step() names the scheduler; after the call is removed the run continues."""
    model, scheduler, engine = engine_of(FACTORIES[kind])
    train(model, engine)
    scheduler.step()
    with pytest.raises(SettingError, match=rf"{type(scheduler).__name__}.step\(\) was called in addition"):
        train(model, engine)
    engine.step()
    train(model, engine)


def test_a_step_of_a_nested_scheduler_is_rejected():
    """A scheduler inside SequentialLR is stepped by it alone."""
    model, scheduler, engine = engine_of(FACTORIES["sequential"])
    train(model, engine)
    scheduler._schedulers[1].step()
    with pytest.raises(SettingError, match=r"SequentialLR.step\(\) was called"):
        train(model, engine)


def test_a_step_inside_a_window_and_around_skips_is_rejected():
    """The call is detected at the next micro-batch, and after a skipped step, which advances nothing itself."""
    model, scheduler, engine = engine_of(FACTORIES["step"], accumulate=2)
    scheduler.optimizer._opt_called = True  # or torch warns about the order
    train(model, engine)
    scheduler.step()
    with pytest.raises(SettingError, match="was called in addition"):
        train(model, engine)
    model, scheduler, engine = engine_of(FACTORIES["step"])
    assert train(model, engine, poison=True).skipped
    scheduler.step()
    with pytest.raises(SettingError, match="was called in addition"):
        train(model, engine)


def test_a_step_before_a_late_delivery_is_rejected():
    """On a GPU the Engine's own step comes later; a foreign one before it is still reported."""
    scheduler = FACTORIES["step"](torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=1.0))
    schedules = Schedules([scheduler])
    schedules.check()
    scheduler.optimizer.step()
    scheduler.step()  # foreign
    schedules.advance(1)  # as evaluate() would deliver it
    with pytest.raises(SettingError, match="was called in addition"):
        schedules.check()


@pytest.mark.parametrize("kind", FACTORIES)
def test_the_engines_own_steps_and_loads_are_accepted(kind, tmp_path):
    """Fast-forwarding before the first step, skips, and loading a state in the middle are not foreign steps."""
    model, scheduler, engine = engine_of(FACTORIES[kind])
    scheduler.optimizer._opt_called = True  # or torch warns about the order
    scheduler.step()
    scheduler.step()
    for poison in (False, True, False):
        train(model, engine, poison=poison)
    engine.save(tmp_path / "a")
    train(model, engine)
    engine.load(tmp_path / "a")
    train(model, engine)
    state = engine.state_dict()
    train(model, engine)
    engine.load_state_dict(state)
    train(model, engine)


def test_two_schedulers_of_one_optimizer_are_accepted():
    """Several schedulers are stepped one after the other."""
    model, _, engine = engine_of(lambda o: [lr_scheduler.StepLR(o, 1, 0.5), lr_scheduler.ExponentialLR(o, 0.5)])
    for _ in range(3):
        train(model, engine)
    assert engine.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.25**3)


def test_a_scheduler_that_is_passed_twice_is_rejected():
    """The same scheduler twice, or inside another one that is passed, would be stepped twice."""
    with pytest.raises(SettingError, match="StepLR is in scheduler= twice"):
        engine_of(lambda o: [lr_scheduler.StepLR(o, 1, 0.5)] * 2)

    def both(optimizer):
        outer = FACTORIES["chained"](optimizer)
        return [outer, outer._schedulers[0]]

    with pytest.raises(SettingError, match="stepped twice per update"):
        engine_of(both)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_scheduler_that_counts_updates_gets_their_number(precision):
    """timm's step_update receives 1, 2, 3: the number of applied updates, skipped ones not counted."""
    model, scheduler, engine = engine_of(UpdateScheduler, precision)
    for poison in (False, True, False, False):
        train(model, engine, poison=poison)
    assert scheduler.numbers == [1, 2, 3]
    assert engine.optimizers[0].param_groups[0]["lr"] == 0.25


def test_schedulers_that_need_an_epoch_are_rejected_by_name():
    """An Engine knows updates, not epochs; the message has the way out."""
    with pytest.raises(SettingError, match=r"UpdateScheduler counts epochs.*t_in_epochs=False"):
        engine_of(lambda o: UpdateScheduler(o, t_in_epochs=True))
    with pytest.raises(SettingError, match=r"EpochScheduler.step\(\) needs epoch"):
        engine_of(EpochScheduler)


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_a_plateau_scheduler_is_stepped_with_its_metric(precision, tmp_path):
    """step_scheduler(metric) lowers the rate as torch's scheduler alone would, and its state is saved."""
    model, plateau, engine = engine_of(lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1), precision)
    for metric in (1.0, torch.tensor(1.0), 1.0):
        train(model, engine)
        engine.step_scheduler(metric)
    assert engine.optimizers[0].param_groups[0]["lr"] == 0.5
    engine.save(tmp_path / "a")
    engine.step_scheduler(1.0)
    assert plateau.num_bad_epochs == 1
    engine.load(tmp_path / "a")
    assert (plateau.num_bad_epochs, plateau.best) == (0, 1.0)


def test_only_schedulers_that_need_a_metric_are_stepped_with_it():
    """Next to a plateau scheduler, one that counts updates is stepped by engine.step() only."""
    model, _, engine = engine_of(lambda o: [lr_scheduler.StepLR(o, 1, 0.5), lr_scheduler.ReduceLROnPlateau(o)])
    train(model, engine)
    engine.step_scheduler(2.0)
    train(model, engine)
    assert engine.optimizers[0].param_groups[0]["lr"] == 0.25
    assert engine.schedulers[1].best == 2.0


def test_a_metric_that_cannot_be_used_is_rejected():
    """No scheduler that takes it, no number, or NaN."""
    _, _, engine = engine_of(FACTORIES["step"])
    with pytest.raises(SettingError, match="nothing to step"):
        engine.step_scheduler(1.0)
    _, _, engine = engine_of(lr_scheduler.ReduceLROnPlateau)
    for metric in ("low", None, torch.ones(2), True, {"loss": 1.0}):
        with pytest.raises(SettingError, match="takes one number"):
            engine.step_scheduler(metric)
    with pytest.raises(SettingError, match="not a number"):
        engine.step_scheduler(float("nan"))


def test_a_direct_step_of_a_plateau_scheduler_is_accepted():
    """The Engine never steps it by itself, so nothing happens twice."""
    model, plateau, engine = engine_of(lr_scheduler.ReduceLROnPlateau)
    for _ in range(3):
        train(model, engine)
        plateau.step(1.0)


def test_settings_cannot_be_assigned_after_construction():
    """An option, attribute or method of an Engine: assigning would change nothing."""
    model, _, engine = engine_of(FACTORIES["step"])
    settings = {
        "accumulate": 4,
        "max_norm": 1.0,
        "model": model,
        "policy": "bf16",
        "step": None,
        "gradient_release": True,
    }
    for name, value in settings.items():
        with pytest.raises(SettingError, match=rf"engine.{name} = .*fixed when it is built.*Pass {name}= to Engine"):
            setattr(engine, name, value)
    assert train(model, engine).boundary


def test_names_of_the_users_own_can_be_assigned():
    """Notes on an Engine, again and again, and the attributes of a subclass from before and after its set-up."""

    class Tracked(Engine):
        best_loss = 1.0

        def __init__(self, *args, **kwargs):
            self.epoch = 0
            super().__init__(*args, **kwargs)
            self.num_steps = 0

    model = nn.Linear(4, 4)
    engine = Tracked(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32")
    for number in (1, 2):
        engine.epoch = engine.num_steps = engine.best_loss = engine.my_model = number
    assert (engine.epoch, engine.num_steps, engine.best_loss, engine.my_model) == (2, 2, 2, 2)
    with pytest.raises(SettingError, match="fixed when it is built"):
        engine.accumulate = 4
    assert train(model, engine).boundary
