"""An Engine and the float64 reference side by side: set-up, and the comparison of every number that can be observed."""

import torch
from torch import nn

import halfstep
from fuzz_moves import GAMMA, OPTIONS, falling
from fuzz_reference import RULES, Reference, ulp
from halfstep.errors import SettingError

__all__ = ["Mismatch", "Run", "check", "losses_of", "make_optimizer", "make_schedulers"]


class Mismatch(AssertionError):
    """The Engine and the reference disagree."""


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
        self.captured, self.memory = {}, None
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
        if model is None:
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
                wanted = (
                    *RULES[self.config.rule_of(name)[0]][1],
                    *(["step"] if self.config.counts_steps(name) else []),
                )
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
        for key in sorted(observed.keys() | reference.values.keys()):
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
        for key in sorted(before.keys() | after.keys()):
            check(f"after a rejected call: {' '.join(key)}", after[key], before[key])
        if grads.keys() != grads_after.keys():
            raise Mismatch(
                f"a rejected call changed which gradients exist: {sorted(grads.keys() ^ grads_after.keys())}"
            )
        for name, grad in grads.items():
            check(f"after a rejected call: gradient {name}", grads_after[name], grad)

    def load_twin(self, kind="weight"):
        """Give the float64 twin the numbers of the model, or of its EMA."""
        values = self.reference.values
        with torch.no_grad():
            for name, p in self.twin.named_parameters():
                p.copy_(values.get((kind, name), values["weight", name]))
                p.requires_grad_(self.params[name].requires_grad)
            for name, b in self.twin.named_buffers():
                b.copy_(values["buffer", name])

    def storing_slack(self, config, name, value):
        """How far a master may be from the fp32 value that it is made from."""
        dtype = config.stored_dtype(name)
        if dtype is None:
            return torch.zeros_like(value)
        if config.master == "none" or not self.params[name].requires_grad:  # frozen: rounded, without a master
            return ulp(value, dtype)
        return torch.full_like(value, 2.0**-40 if dtype is torch.float16 and config.master == "split" else 0.0)

    def rate(self, name):
        """The learning rate of a parameter."""
        i, j = self.config.place_of(name)
        return self.reference.values["lr", f"{i}.{j}"]


def check(label, new, expected, slack=None):
    """Raise Mismatch unless every number is within its slack; non-finite ones must be the same."""
    if new.shape != expected.shape:
        raise Mismatch(f"{label} has shape {tuple(new.shape)}, expected {tuple(expected.shape)}")
    if torch.equal(new, expected):
        return
    close = (new == expected) | (new.isnan() & expected.isnan())
    if slack is not None:
        close |= (new - expected).abs() <= slack
    if not bool(close.all()):
        at = tuple((~close).nonzero()[0].tolist())
        allowed = 0.0 if slack is None else float(slack.expand_as(new)[at])
        raise Mismatch(
            f"{label}{list(at)} is {float(new[at])!r}, expected {float(expected[at])!r} within {allowed:.3g}"
        )


def _double(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float64, copy=True)
    return torch.tensor(value, dtype=torch.float64)
