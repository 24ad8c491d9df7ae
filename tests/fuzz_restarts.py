"""The moves that replace the Engine of a random run: by one that loads its state, or by a new one on the same model."""

import copy
import dataclasses
import random
import tempfile
from pathlib import Path

import torch

from fuzz_reference import Reference, Scale, stored_slack, ulp
from fuzz_run import Mismatch, Run, make_optimizer, make_schedulers

__all__ = ["Restarts"]

MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg"}


class Restarts(Run):
    """A run whose Engine can be replaced."""

    def remember(self):
        """Take a state, for a later `rewind`."""
        if self.reference.window.has_gradients:
            return self.rejected(self.engine.state_dict)
        values, scale = dict(self.reference.values), copy.deepcopy(self.reference.scale)
        self.memory = self.config, copy.deepcopy(self.engine.state_dict()), values, scale
        return None

    def rewind(self):
        """Load the state of an earlier moment into the same Engine; a window in progress is dropped."""
        if self.memory is None or self.memory[0] != self.config:
            return
        _, state, values, scale = self.memory
        self.engine.load_state_dict(copy.deepcopy(state))
        self.reference.values, self.reference.scale = dict(values), copy.deepcopy(scale)
        self.reference.slack = {}
        self.reference.reset_window()
        if self.gradients():
            raise Mismatch("gradients left after load_state_dict()")

    def optimizer_state(self, index):
        """The user's own optimizer loads its own state: nothing changes."""
        optimizer = self.optimizers[index % len(self.optimizers)]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def folder(self):
        """A temporary directory."""
        return tempfile.TemporaryDirectory()

    def reload(self, seed, disk=False, precision=None, shuffle=False):
        """Save, and continue in a new Engine: perhaps of another precision, with everything in another order."""
        if self.reference.window.has_gradients:
            return self.rejected(self.engine.state_dict)
        rng, old = random.Random(seed), self.config
        config = dataclasses.replace(old, precision=precision or old.precision, seed=seed % 1000)
        if not config.precision.startswith("fp16"):
            config = dataclasses.replace(config, dynamic=None)
        saved, engine = copy.deepcopy(self.engine.state_dict()), self.engine
        order = shuffled(rng, config) if shuffle else config
        rates = {name: self.rate(name) for name in self.params}
        with self.folder() as folder:
            if disk:
                engine.save(Path(folder) / "checkpoint", note=seed)
            engine.close()
            self.build(order, frozen=[n for n, p in self.params.items() if not p.requires_grad])
            if disk:
                if self.engine.load(Path(folder) / "checkpoint") != {"note": seed}:
                    raise Mismatch("load() did not return what was saved as extra")
            else:
                self.engine.load_state_dict(saved)
        self.reloaded(old, order, rates)
        return None

    def reloaded(self, old, new, rates):
        """What must be the same after loading, and what may have been rounded."""
        reference = self.reference
        scale = Scale(new.loss_scale)
        if scale.mode == reference.scale.mode:
            scale = reference.scale
        layouts_differ = (old.precision, old.master, old.states) != (new.precision, new.master, new.states)
        for (kind, name), value in list(reference.values.items()):
            if kind == "master":
                slack = self.storing_slack(new, name, value) if layouts_differ else None
                dtype = new.stored_dtype(name)
                reference.expect((kind, name), value, slack)
                rounding = (
                    None if not layouts_differ else torch.zeros_like(value) if dtype is None else ulp(value, dtype)
                )
                expected = value if layouts_differ else reference.values["weight", name]
                reference.expect(("weight", name), expected, rounding)
            elif kind in MOMENTS and old.states != new.states:
                reference.expect((kind, name), value, stored_slack(kind, value, new.states))
            elif kind == "lr":
                del reference.values[kind, name]
        for name, rate in rates.items():
            i, j = new.place_of(name)
            reference.expect(("lr", f"{i}.{j}"), rate)
        reference.scale, reference.config, reference.widened = scale, new, set()
        reference.expect(("scale", ""), torch.tensor(scale.value, dtype=torch.float64))
        reference.reset_window()

    def rebuild(self):
        """Close the Engine and build another one on the same model."""
        self.reset_window()
        self.engine.close()
        self.rejected(lambda: self.engine.forward().__enter__())
        self.rejected(self.engine.step)
        old, config = self.reference, self.config
        if config.adopts:  # the masters belonged to the old optimizers
            optimizers = [make_optimizer(*spec, self.params) for spec in config.optimizers]
            schedulers = make_schedulers(config, optimizers)
        else:
            optimizers, schedulers = self.optimizers, self.schedulers
        self.build(config, self.model, optimizers, schedulers, frozen=())
        values = self.observe()
        self.reference = Reference(config, values, self.union)
        self.reference.widened = old.widened
        for (kind, name), value in old.values.items():
            if kind in {"weight", "buffer"} or (
                not config.adopts and kind not in {"attempts", "applied", "micro_batches", "scale", "ema"}
            ):
                self.reference.expect((kind, name), value)
            if kind == "weight":
                self.reference.expect(("master", name), value)
                if config.ema is not None:
                    self.reference.expect(("ema", name), value)


def shuffled(rng, config):
    """The same set-up with optimizers, groups and parameters in another order."""
    order = list(range(len(config.optimizers)))
    rng.shuffle(order)
    optimizers = []
    for i in order:
        kind, lr, groups = config.optimizers[i]
        groups = [tuple(rng.sample(group, len(group))) for group in groups]
        rng.shuffle(groups)
        optimizers.append((kind, lr, tuple(groups)))
    schedules = [config.schedules[i] for i in order]
    return dataclasses.replace(config, optimizers=tuple(optimizers), schedules=(*schedules, None)[:2])
