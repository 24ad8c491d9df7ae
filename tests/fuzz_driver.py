"""Runs random moves on a real Engine and on the float64 reference, and compares every number after each move."""

import copy
import dataclasses
import math
import random
import tempfile
from pathlib import Path

import torch
from fuzz_moves import GAMMA, KNOWN, OPTIONS, Config, batch, falling, parameter_names, program
from fuzz_reference import RULES, Illegal, Reference, Scale, stored_slack, ulp
from torch import nn

import halfstep
from halfstep.errors import OverflowStop, SettingError

__all__ = ["Config", "Mismatch", "Run", "replay", "shrink"]


class Mismatch(AssertionError):
    """The Engine and the reference disagree."""


class Abort(Exception):
    """Raised inside a forward or backward, as user code would."""


class Net(nn.Module):
    """Two linear layers, perhaps tied, perhaps with batch norm, and a parameter that not every forward uses."""

    def __init__(self, config):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.batch = nn.BatchNorm1d(4) if config.batch_norm else nn.Identity()
        self.spare = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if config.tied:
            self.second.weight = self.first.weight
        generator = torch.Generator().manual_seed(config.seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.5)

    def forward(self, x, *, spare=False):
        if self.training:
            self.calls += 1
        self.hidden = torch.tanh(self.batch(self.first(x)))
        y = self.second(self.hidden)
        return y * self.spare if spare else y


def losses_of(y, target):
    """Two losses of one output."""
    return ((y - target) ** 2).mean(), torch.sin(y.to(target.dtype)).mean()


def make_optimizer(kind, lr, groups, params):
    """A stock optimizer, or Lion, over groups of names."""
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
    parts = [{"params": [params[name] for name in group]} for group in groups]
    return make.get(kind, halfstep.optim.Lion)(parts, lr=lr, **OPTIONS[kind])


def make_schedulers(config, optimizers):
    """One scheduler for each optimizer that has one."""
    lr_scheduler = torch.optim.lr_scheduler
    return [
        lr_scheduler.ExponentialLR(optimizers[i], GAMMA)
        if config.schedules[i] == "exponential"
        else lr_scheduler.LambdaLR(optimizers[i], falling)
        for i in config.scheduled
    ]


class Run:
    """An Engine with its model and optimizers, next to the reference."""

    def __init__(self, config, wrap=lambda model: model, union=None):
        self.config, self.wrap, self.union = config, wrap, union
        self.twin = Net(config).double()
        self.captured, self.multipliers = {}, []
        self.build(config)
        start = {("master", name): p.detach().double().clone() for name, p in Net(config).named_parameters()}
        self.reference = Reference(config, self.observe(), union)
        for key, value in start.items():
            self.reference.expect(key, value, self.storing_slack(config, key[1], value))
        self.compare()

    # --- set-up and observation -----------------------------------------------------------------------------------

    def build(self, config, model=None, optimizers=None, schedulers=None, frozen=None):
        """The model, its optimizers and the Engine."""
        self.config = config
        self.model = Net(config) if model is None else model
        self.params = dict(self.model.named_parameters())
        for name in config.frozen if frozen is None else frozen:
            self.params[name].requires_grad_(requires_grad=False)
        if optimizers is None:
            optimizers = [make_optimizer(*spec, self.params) for spec in config.optimizers]
            schedulers = make_schedulers(config, optimizers)
        self.optimizers, self.schedulers = optimizers, schedulers
        self.wrapped = self.wrap(self.model)
        self.engine = halfstep.Engine(
            self.wrapped,
            self.optimizers,
            config.text,
            max_norm=config.max_norm,
            accumulate=config.accumulate,
            scheduler=self.schedulers,
            ema=config.ema,
        )
        if model is None:
            for name, p in self.params.items():
                p.requires_grad_()
                p.register_hook(lambda grad, name=name: self.captured.__setitem__(name, grad.detach().clone()))
                p.requires_grad_(name not in (config.frozen if frozen is None else frozen))

    def observe(self):
        """Every number that a call may change, in float64."""
        engine = self.engine
        values = {("master", name): m for name, m in engine.masters().items()}
        values |= {("weight", name): p for name, p in self.params.items()}
        values |= {("buffer", name): b for name, b in self.model.named_buffers()}
        values |= {} if engine.ema is None else {("ema", name): a for name, a in engine.ema.averages.items()}
        names = {id(p): name for name, p in self.params.items()}
        for i, optimizer in enumerate(engine.optimizers):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            saved = optimizer.torch_state_dict() if hasattr(optimizer, "torch_state_dict") else optimizer.state_dict()
            for index, state in saved["state"].items():
                name = names[id(params[index])]
                wanted = (*RULES[self.config.rule_of(name)[0]][1], *(["step"] if self.config.counts_steps(name) else []))
                values |= {(key, name): state[key] for key in wanted if state.get(key) is not None}
            for j, group in enumerate(self.optimizers[i].param_groups):
                values["lr", f"{i}.{j}"] = group["lr"]
        values["scale", ""] = engine.scaler.get_scale()
        values["schedule", ""] = self.schedulers[0].last_epoch if self.schedulers else 0
        for counter in ("attempts", "applied", "micro_batches"):
            values[counter, ""] = getattr(engine.progress, counter)
        return {k: _double(v) for k, v in values.items()}

    def gradients(self):
        """The gradients as they are, in float64."""
        return {n: p.grad.detach().double().clone() for n, p in self.params.items() if p.grad is not None}

    def compare(self):
        """Raise Mismatch for a number that is not as expected; then take what was observed as the new values."""
        observed, reference = self.observe(), self.reference
        for key in observed.keys() | reference.values.keys():
            new, expected = observed.get(key), reference.values.get(key)
            new = torch.zeros_like(expected) if new is None else new
            expected = torch.zeros_like(new) if expected is None else expected
            check(" ".join(key), new, expected, reference.slack.get(key))
        if self.config.master in {"split", "fp32"}:
            for name in self.params:
                dtype = self.config.stored_dtype(name)
                if dtype is not None:
                    master = observed["master", name]
                    check(f"rounded {name}", observed["weight", name], master, 0.5001 * ulp(master, dtype))
        if self.engine.in_window != reference.window.has_gradients:
            raise Mismatch(f"in_window is {self.engine.in_window}")
        reference.values, reference.slack = observed, {}

    def rejected(self, call):
        """The Engine must raise SettingError and change nothing."""
        before, grads = self.observe(), self.gradients()
        try:
            call()
        except SettingError:
            pass
        else:
            raise Mismatch("no SettingError")
        after, grads_after = self.observe(), self.gradients()
        for key in before.keys() | after.keys():
            check(f"after a rejected call: {' '.join(key)}", after[key], before[key])
        if grads.keys() != grads_after.keys():
            raise Mismatch(f"a rejected call changed which gradients exist: {sorted(grads.keys() ^ grads_after.keys())}")
        for name, grad in grads.items():
            check(f"after a rejected call: gradient {name}", grads_after[name], grad)

    # --- moves ----------------------------------------------------------------------------------------------------

    def forward(self, x, *, spare, poisoned=False):
        """A forward under the Engine, and the buffers that it must leave."""
        self.reference.begin_forward()
        with self.engine.forward():
            y = self.wrapped(x, spare=spare)
        self.load_twin()
        exact = self.twin(x.double(), spare=spare)
        expected = {name: b.double() for name, b in self.twin.named_buffers()}
        for name, buffer in self.model.named_buffers():
            new = buffer.detach().double().clone()
            loose = 0.05 * (new.abs() + 1) if self.config.precision[:4] != "fp32" else 1e-5 * (new.abs() + 1)
            counts = name == "calls" or name.endswith("num_batches_tracked")
            if not poisoned:
                check(f"buffer {name} after a forward", new, expected[name], None if counts else loose)
            self.reference.expect(("buffer", name), new)
        return y, exact

    def load_twin(self, kind="weight"):
        """Give the float64 twin the numbers of the model, or of its EMA."""
        values = self.reference.values
        with torch.no_grad():
            for name, p in self.twin.named_parameters():
                p.copy_(values.get((kind, name), values["weight", name]))
                p.requires_grad_(self.params[name].requires_grad)
            for name, b in self.twin.named_buffers():
                b.copy_(values["buffer", name])

    def micro_batch(self, seed, weight=None, losses=1, spare=False, poison=None, size=1.0):
        """A forward and the backward of one or two losses."""
        x, target = batch(seed, size)
        if poison == "activation":
            x[0, 0] = math.inf
        kind, number = weight or (None, 1)
        number = float(number)
        y, exact = self.forward(x, spare=spare, poisoned=poison == "activation")
        with self.engine.forward():
            parts = list(losses_of(y, target))[:losses]
        if poison == "loss":
            parts[0] = parts[0] * math.inf
        if poison == "gradient" and self.model.hidden.requires_grad:
            self.model.hidden.register_hook(_spoil)
        for i, loss in enumerate(parts):
            retain = i + 1 < len(parts)
            try:
                if not loss.requires_grad:
                    raise Illegal
                self.reference.may_backward(kind, number)
            except Illegal:
                self.rejected(lambda loss=loss, r=retain: self.engine.backward(loss, _typed(kind, number), retain_graph=r))
                continue
            self.captured.clear()
            seen = []
            loss.register_hook(lambda grad: seen.append(float(grad)))
            self.engine.backward(loss, _typed(kind, number), retain_graph=retain)
            if seen[0] > self.reference.scale.value and "growing weights" not in KNOWN:
                raise Mismatch(f"the loss was multiplied by {seen[0]:g}, more than the loss scale")
            self.reference.backward(self.captured, seen[0], kind, number)
            if poison is None and seen[0]:
                self.check_gradients(losses_of(exact, target.double())[i], seen[0], retain=retain)

    def check_gradients(self, loss, multiplier, *, retain):
        """Compare what backward produced with float64: tightly in fp32, and for gross errors in 16 bits."""
        params = {n: p for n, p in self.twin.named_parameters() if p.requires_grad}
        exact = torch.autograd.grad(loss, list(params.values()), allow_unused=True, retain_graph=retain)
        exact = {n: g for n, g in zip(params, exact, strict=True) if g is not None}
        if exact.keys() != self.captured.keys():
            raise Mismatch(f"gradients of {sorted(self.captured)} where {sorted(exact)} are due")
        grads = {n: g.double() / multiplier for n, g in self.captured.items()}
        if not all(bool(g.isfinite().all()) for g in grads.values()):
            if not self.config.precision.startswith("fp16"):
                raise Mismatch("non-finite gradients of a healthy loss")
            return
        largest = max(float(g.abs().max()) for g in exact.values())
        share = 2e-5 if self.config.precision.startswith("fp32") else 0.3
        share *= 100 if self.config.batch_norm else 1  # it amplifies rounding where a batch varies little
        floor = 2.0**-18 / multiplier if self.config.precision.startswith("fp16") else 1e-30
        for name, grad in grads.items():
            check(f"gradient of {name}", grad, exact[name], torch.full_like(grad, share * largest + floor))

    def step(self, last=False):
        """End the micro-batch."""
        reference = self.reference
        try:
            reference.may_step()
        except Illegal:
            return self.rejected(lambda: self.engine.step(last=last))
        edited = self.gradients() if reference.window.unscaled else None
        lr = self.optimizers[0].param_groups[0]["lr"]
        outcome = reference.step(last=last, edited=edited)
        try:
            result = self.engine.step(last=last)
        except OverflowStop:
            if not outcome.stops:
                raise
            return None
        if outcome.stops:
            raise Mismatch("no OverflowStop")
        for name, new, expected in (
            ("boundary", result.boundary, outcome.boundary),
            ("skipped", result.skipped, outcome.skipped),
            ("scale", result.scale, outcome.scale),
            ("lr", result.lr, lr),
            ("step", result.step, int(reference.values["attempts", ""])),
        ):
            if new != expected:
                raise Mismatch(f"result.{name} is {new}, expected {expected}")
        if outcome.boundary and not outcome.skipped:
            norm = torch.tensor(outcome.norm, dtype=torch.float64)
            check("result.grad_norm", torch.tensor(result.grad_norm).double(), norm, 1e-4 * norm + 1e-30)
        if outcome.boundary and self.gradients():
            raise Mismatch(f"gradients left after an update: {sorted(self.gradients())}")
        return result

    def unscale(self, edit=None):
        """Divide the gradients, compare them, then edit them."""
        try:
            self.reference.may_unscale()
        except Illegal:
            return self.rejected(self.engine.unscale)
        self.engine.unscale()
        expected, grads = self.reference.unscale(), self.gradients()
        if not self.reference.window.bad:
            for name, (grad, doubt) in expected.items():
                check(f"unscaled gradient of {name}", grads[name], grad, 2 * doubt + 1e-30)
        present = [p for p in self.params.values() if p.grad is not None]
        if edit == "clip":
            torch.nn.utils.clip_grad_norm_(present, 0.05)
        elif edit is not None:
            present[0].grad.mul_(0.5 if edit == "halve" else math.inf)
        return None

    def reset_window(self):
        """Drop the window."""
        self.engine.reset_window()
        before = self.reference.buffers_before
        self.reference.reset_window()
        if "reset_window and buffers" in KNOWN:
            self.reference.buffers_before = before
        if self.gradients():
            raise Mismatch("gradients left after reset_window()")

    def forward_only(self, seed, fails):
        """A forward whose output is not used, or that raises."""
        try:
            self.forward(batch(seed)[0], spare=False)
            with self.engine.forward():
                if fails:
                    raise Abort
        except Abort:
            pass

    def failing_backward(self, seed, where):
        """A backward that raises before or after some gradients have been computed; the window is dropped."""
        x, target = batch(seed)
        y, _ = self.forward(x, spare=True)
        spot = self.model.hidden if where == "hidden" else y
        if not spot.requires_grad or self.reference.window.unscaled:
            return
        spot.register_hook(_abort)
        with self.engine.forward():
            loss = losses_of(y, target)[0]
        try:
            self.engine.backward(loss)
        except (Abort, SettingError):  # SettingError: another weight than the micro-batch in progress has
            self.reset_window()
        else:
            raise Mismatch("the error of a backward was lost")

    def tamper(self, how):
        """Change gradients behind the Engine's back; the step must be rejected, and reset_window() continues."""
        grads = [p for p in self.params.values() if p.grad is not None]
        if not self.reference.window.has_gradients or self.reference.window.unscaled or not grads:
            return
        if how == "edit":
            grads[0].grad.mul_(0.5)
        elif how == "clear":
            grads[0].grad = None
        else:
            p = next(p for p in self.params.values() if p.requires_grad)
            p.float().pow(2).sum().backward()
        self.rejected(self.engine.step)
        self.reset_window()

    def evaluate(self, seed, ema):
        """Validation changes nothing, and uses the weights or the EMA."""
        x = batch(seed)[0]
        if ema and self.config.ema is None:
            return self.rejected(lambda: self.engine.evaluate(ema=True).__enter__())
        grads = self.gradients()
        with self.engine.evaluate(ema=ema):
            y = self.model(x, spare=True)
        self.load_twin("ema" if ema else "weight")
        self.twin.eval()
        exact = self.twin(x.double(), spare=True).detach()
        self.twin.train()
        if bool(exact.isfinite().all()):
            share = 1e-4 if self.config.precision.startswith("fp32") else 0.1
            check("output in evaluate", y.double(), exact, share * (1 + exact.abs().max()).expand_as(exact))
        if y.requires_grad or not self.model.training:
            raise Mismatch("evaluate() recorded a graph, or left the model in eval mode")
        after = self.gradients()
        if grads.keys() != after.keys() or not all(torch.equal(g, after[n]) for n, g in grads.items() if g.isfinite().all()):
            raise Mismatch("evaluate() changed gradients")
        return None

    def set_lr(self, name, value):
        """The learning rate of a group, set by hand."""
        i, j = self.config.place_of(name)
        self.optimizers[i].param_groups[j]["lr"] = value
        self.reference.expect(("lr", f"{i}.{j}"), torch.tensor(value, dtype=torch.float64))

    def freeze(self, name, trainable):
        """Switch a parameter's gradient off or on; one always stays on."""
        others = [p for n, p in self.params.items() if n != name and n.startswith("first.w")]
        self.params[name].requires_grad_(trainable or not any(p.requires_grad for p in others))

    def edit(self, name, how, seed):
        """An edit of a weight outside the Engine wins: its master follows."""
        if "edit of 16-bit weights" in KNOWN and self.config.is_lean:
            return
        param, generator = self.params[name], torch.Generator().manual_seed(seed)
        new = torch.randn(param.shape, generator=generator)
        with torch.no_grad():
            if how == "zero_":
                param.zero_()
            elif how == "clamp_":
                param.data.clamp_(-0.1, 0.1)
            elif how == "copy_":
                param.copy_(new)
            elif how == "data":
                param.data = (param.data.float() * 0.5).to(param.dtype)
            elif how == "mask":
                param.mul_((new > 0).to(param.dtype))
            else:
                state = {n: t.clone() for n, t in self.model.state_dict().items()}
                state[name] = new.to(param.dtype)
                self.model.load_state_dict(state)
        after, values, dtype = param.detach().double().clone(), self.reference.values, self.config.stored_dtype(name)
        changed = after != values["weight", name]
        slack = None if dtype is None else torch.where(changed, 0.5001 * ulp(after, dtype), torch.zeros(()).double())
        self.reference.expect(("weight", name), after)
        self.reference.expect(("master", name), torch.where(changed, after, values["master", name]), slack)

    def reload(self, seed, disk, precision, shuffle):
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
        with tempfile.TemporaryDirectory() as folder:
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

    def rate(self, name):
        """The learning rate of a parameter."""
        i, j = self.config.place_of(name)
        return self.reference.values["lr", f"{i}.{j}"]

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
                rounding = None if not layouts_differ else torch.zeros_like(value) if dtype is None else ulp(value, dtype)
                expected = value if layouts_differ else reference.values["weight", name]
                reference.expect(("weight", name), expected, rounding)
            elif kind in {"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg"} and old.states != new.states:
                reference.expect((kind, name), value, stored_slack(kind, value, new.states))
            elif kind == "lr":
                del reference.values[kind, name]
        for name, rate in rates.items():
            i, j = new.place_of(name)
            reference.expect(("lr", f"{i}.{j}"), rate)
        reference.scale, reference.config, reference.widened = scale, new, set()
        reference.expect(("scale", ""), torch.tensor(scale.value, dtype=torch.float64))
        reference.reset_window()

    def storing_slack(self, config, name, value):
        """How far a master may be from the fp32 value that it is made from."""
        dtype = config.stored_dtype(name)
        if dtype is None:
            return torch.zeros_like(value)
        if config.master == "none" or not self.params[name].requires_grad:  # frozen: rounded, without a master
            return ulp(value, dtype)
        return torch.full_like(value, 2.0**-40 if dtype is torch.float16 and config.master == "split" else 0.0)

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
            if kind in {"weight", "buffer"} or (not config.adopts and kind not in {"attempts", "applied", "micro_batches", "scale", "ema"}):
                self.reference.expect((kind, name), value)
            if kind == "weight":
                self.reference.expect(("master", name), value)
                if config.ema is not None:
                    self.reference.expect(("ema", name), value)

    def illegal(self, call):
        """A call that is rejected in every state."""
        engine, loss = self.engine, self.params["first.weight"].float().pow(2).sum()
        state = {} if self.reference.window.has_gradients or not call.startswith("state") else copy.deepcopy(engine.state_dict())
        if call.startswith("state") and not state:
            return
        if call == "state of another version":
            state["version"] = 99
        elif call == "state without a weight":
            del state["model"]["spare"]
        elif call == "state without an optimizer":
            state["optimizers"] = state["optimizers"][1:]
        elif call == "state with a wrong shape":
            state["model"]["spare"] = torch.zeros(3)
        self.rejected(
            {
                "loss is a number": lambda: engine.backward(1.0),
                "loss is a vector": lambda: engine.backward(loss.expand(2)),
                "loss without graph": lambda: engine.backward(torch.ones(())),
                "negative weight": lambda: engine.backward(loss, weight=-1),
                "NaN weight": lambda: engine.backward(loss, weight=math.nan),
                "infinite weight": lambda: engine.backward(loss, weight=math.inf),
                "weight is text": lambda: engine.backward(loss, weight="many"),
                "weight is a vector": lambda: engine.backward(loss, weight=torch.ones(2)),
                "step in forward": self.step_in_forward,
                "optimizer.step": self.optimizers[0].step,
            }.get(call, lambda: engine.load_state_dict(state))
        )

    def step_in_forward(self):
        """A step where weights are cast and cached."""
        self.reference.begin_forward()
        with self.engine.forward():
            self.engine.step()


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


def check(label, new, expected, slack=None):
    """Raise Mismatch unless every number is within its slack; non-finite ones must be the same."""
    if new.shape != expected.shape:
        raise Mismatch(f"{label} has shape {tuple(new.shape)}, expected {tuple(expected.shape)}")
    close = (new == expected) | (new.isnan() & expected.isnan())
    if slack is not None:
        close |= (new - expected).abs() <= slack
    if not bool(close.all()):
        at = tuple((~close).nonzero()[0].tolist())
        allowed = 0.0 if slack is None else float(slack.expand_as(new)[at])
        raise Mismatch(f"{label}{list(at)} is {float(new[at])!r}, expected {float(expected[at])!r} within {allowed:.3g}")


def _double(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float64, copy=True)
    return torch.tensor(value, dtype=torch.float64)


def _typed(kind, number):
    return {None: lambda _: None, "tensor": torch.tensor, "int": int, "float": float}[kind](number)


def _spoil(grad):
    grad = grad.clone()
    grad.view(-1)[0] = math.nan
    return grad


def _abort(_grad):
    raise Abort


def replay(config, moves, **options):
    """Run the moves; raise with the move at fault."""
    run = Run(config, **options)
    for number, (name, arguments) in enumerate(moves):
        try:
            getattr(run, name)(**arguments)
            run.compare()
        except Exception as error:
            error.add_note(f"in move {number}: {name} {arguments}")
            raise
    run.engine.close()


def shrink(config, moves):
    """The failing run with as few moves as possible, as a program with its error, or None if it passes."""
    failure = _failure(config, moves)
    if failure is None:
        return None
    size = len(moves)
    while size:
        start = 0
        while start < len(moves):
            shorter = moves[:start] + moves[start + size :]
            failure_of_shorter = _failure(config, shorter)
            if failure_of_shorter is None:
                start += size
            else:
                moves, failure = shorter, failure_of_shorter
        size //= 2
    return f"{program(config, moves)}\n# {failure}"


def _failure(config, moves):
    try:
        replay(config, moves)
    except Exception as error:
        return f"{type(error).__name__}: {error} " + " ".join(getattr(error, "__notes__", []))
    return None
