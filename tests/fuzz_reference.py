"""What the Engine promises, in float64 and in the fewest lines: the reference of the random-call tests.

Nothing here imports the Engine. The reference gets the gradients that backward produced and the numbers that can be
observed between two calls (`values`), and computes what the next call must make of them. Each expected number has a
`slack`, 0 by default: what a call does not promise to change must keep its value exactly. After each comparison the
observed numbers become the new `values`, so that rounding errors do not add up over a sequence.
"""

import math
from dataclasses import dataclass

import torch

from scaler_rules import RULES as SCALE_RULES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOOR = 1e-37  # fp32 numbers below may be flushed to zero


class Illegal(Exception):
    """The Engine must reject this call with a SettingError and change nothing."""


# --- optimizers: (group options, step number, weight, moments, gradient) -> (weight, moments) -----------------------


def adamw(o, step, w, m, g):
    """Adam with decoupled weight decay."""
    (b1, b2), lr = o["betas"], o["lr"]
    mean, square = b1 * m["exp_avg"] + (1 - b1) * g, b2 * m["exp_avg_sq"] + (1 - b2) * g * g
    denominator = (square / (1 - b2**step)).sqrt() + o["eps"]
    w = w * (1 - lr * o["weight_decay"]) - lr * mean / (1 - b1**step) / denominator
    return w, {"exp_avg": mean, "exp_avg_sq": square}


def sgd(o, step, w, m, g):
    """Momentum without dampening."""
    buffer = o["momentum"] * m["momentum_buffer"] + g + o["weight_decay"] * w
    return w - o["lr"] * buffer, {"momentum_buffer": buffer}


def lion(o, step, w, m, g):
    """The sign of an interpolated momentum."""
    (b1, b2), lr, old = o["betas"], o["lr"], m["exp_avg"]
    sign = torch.sign(b1 * old + (1 - b1) * g)
    return w * (1 - lr * o["weight_decay"]) - lr * sign, {"exp_avg": b2 * old + (1 - b2) * g}


def rmsprop(o, step, w, m, g):
    """The gradient divided by the root of its mean square."""
    g = g + o["weight_decay"] * w
    square = o["alpha"] * m["square_avg"] + (1 - o["alpha"]) * g * g
    return w - o["lr"] * g / (square.sqrt() + o["eps"]), {"square_avg": square}


RULES = {
    "adamw": (adamw, ("exp_avg", "exp_avg_sq")),
    "sgd": (sgd, ("momentum_buffer",)),
    "lion": (lion, ("exp_avg",)),
    "rmsprop": (rmsprop, ("square_avg",)),
}


# --- rounding -------------------------------------------------------------------------------------------------------


def ulp(x, dtype):
    """The distance between neighbours of `dtype` at x."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(x.abs().clamp(min=info.smallest_normal)))
    return torch.exp2(exponent) * info.eps


def stored_slack(moment, x, states):
    """How far a stored moment may be from x in each format, as docs/optim.md defines them."""
    if states == "bf16":
        return ulp(x, torch.bfloat16)
    if states == "8bit":  # the tensors here are smaller than a block
        levels = 255 if moment in {"exp_avg_sq", "square_avg"} else 127
        scale = x.abs().amax()
        return 2 * (x.abs() * scale).sqrt() / levels + scale / levels**2
    return torch.zeros_like(x)


# --- the run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What `step` must return; `stops` if it must raise OverflowStop instead."""

    boundary: bool
    skipped: bool = False
    norm: float | None = None
    scale: float | None = None
    stops: bool = False


class Scale:
    """A loss scale, its rule, and the skips in a row."""

    def __init__(self, text):
        """`text` is the value of the policy's loss_scale: "none", a number, or settings of a dynamic one."""
        self.mode = "none" if text == "none" else "dynamic" if isinstance(text, dict) else "static"
        self.rule, self.skips, self.limit = None, 0, 100
        self.value = 1.0 if self.mode == "none" else text if self.mode == "static" else text["init_scale"]
        if self.mode == "dynamic":
            self.limit = text["max_skips"]
            rule = SCALE_RULES[text["semantics"]]
            interval, hysteresis = text["growth_interval"], text["hysteresis"]
            self.rule = rule(text["init_scale"], 2.0, 0.5, interval, hysteresis, text["min_scale"], text["max_scale"])

    def update(self, overflow):
        """One attempt has ended."""
        self.skips = self.skips + 1 if overflow else 0
        if self.rule is not None:
            self.rule.update(overflow)
            self.value = self.rule.scale


class Window:
    """The sums between two updates, over all ranks at the end."""

    def __init__(self):
        self.num_micro_batches, self.weighed, self.has_gradients, self.unscaled = 0, False, False, False
        self.kind, self.weight = None, 1.0  # of the micro-batch in progress
        self.total, self.bad = 0.0, False
        self.has_weights = True  # that mean something: finite and not negative
        self.sums, self.doubt, self.raw = {}, {}, {}

    def add(self, name, grad, multiplier, weight, narrow):
        """A gradient that was multiplied by `multiplier`; `narrow` is the 16-bit dtype it is summed in, or None."""
        self.bad |= not bool(grad.isfinite().all()) or not math.isfinite(multiplier)
        if narrow is not None:  # one micro-batch, several losses: every loss has the same multiplier
            self.raw[name] = grad.to(narrow) + self.raw.get(name, torch.zeros((), dtype=narrow))
            self.bad |= not bool(self.raw[name].isfinite().all())
            part, old = self.raw[name].double(), 0.0
        else:
            part, old = grad.double(), self.sums.get(name, 0.0)
        part = part / multiplier * weight if multiplier else torch.zeros_like(part)
        self.sums[name] = old + part
        tiny = 2.0**-140 * weight / multiplier if multiplier else 0.0
        self.doubt[name] = self.doubt.get(name, 0.0) + 2e-6 * part.abs() + tiny


class Reference:
    """The expected numbers of one run; `layout` is its Config, with what each parameter is stored in."""

    def __init__(self, config, values, union=None):
        self.config, self.values, self.slack = config, dict(values), {}
        self.window, self.scale = Window(), Scale(config.loss_scale)
        self.buffers_before = None
        self.widened = set()  # names whose 16-bit gradients are stored in fp32 since an unscale
        self.union = union or (lambda window: window)

    # The calls, in the order of the Engine's table. `may_...` raises Illegal where the Engine must.

    def begin_forward(self):
        """The first forward of a window remembers the buffers."""
        if self.buffers_before is None:
            self.buffers_before = {key: v for key, v in self.values.items() if key[0] == "buffer"}

    def may_backward(self, kind, weight, *, has_graph):
        """`kind` is the type of the weight: only Python numbers can be compared without reading a device."""
        window = self.window
        if window.unscaled or not has_graph:
            raise Illegal
        known = kind in {"int", "float"}
        if window.weighed and known and window.kind != "tensor" and weight != window.weight:
            raise Illegal

    def backward(self, grads, multiplier, kind, weight):
        """Gradients by name as they left backward, multiplied by the loss scale and by a factor that is the Engine's own."""
        window = self.window
        if not window.weighed:
            window.kind, window.weight, window.weighed = kind, weight, True
            window.total += weight
            window.has_weights &= math.isfinite(weight) and weight >= 0
            window.bad |= not window.has_weights
        for name, grad in grads.items():
            window.add(name, grad, multiplier, window.weight, self._narrow(name))
        window.has_gradients = True

    def may_unscale(self):
        """Once per window, after a backward."""
        if not self.window.has_gradients or self.window.unscaled:
            raise Illegal

    def unscale(self):
        """The true gradients of the window and how exact they are: name -> (gradient, slack)."""
        self.window.unscaled = True
        self.window = self.union(self.window)
        grads = self.gradients()
        for name, (grad, doubt) in grads.items():
            if self._narrow(name) is torch.float16:
                self.widened.add(name)
            elif self._narrow(name) is not None:  # divided, and rounded once more
                grads[name] = grad, doubt + ulp(grad, self._narrow(name))
        return grads

    def _narrow(self, name):
        return None if name in self.widened else self.config.narrow(name)

    def gradients(self):
        """The weighted mean over the window, by name."""
        window = self.window
        total = window.total or math.nan
        return {n: (s / total, window.doubt[n] / total + 1e-5 * (s / total).abs()) for n, s in window.sums.items()}

    def may_step(self):
        """After a backward."""
        if not self.window.has_gradients:
            raise Illegal

    def step(self, *, last, edited=None):
        """End a micro-batch; `edited` are the gradients as they are now, if they were unscaled."""
        window = self.window
        window.num_micro_batches += window.weighed
        self._count("micro_batches", window.weighed)
        window.weighed = False
        if window.num_micro_batches < self.config.accumulate and not last:
            return Outcome(boundary=False)
        if edited is not None:
            grads = {name: (g, 1e-5 * g.abs()) for name, g in edited.items()}
        else:
            self.window = self.union(self.window)
            grads = self.gradients()
        norm = math.sqrt(sum(float((g * g).sum()) for g, _ in grads.values()))
        # All weights are 0: there is nothing to learn from, for the loss scale neither.
        empty = self.window.total == 0 and self.window.has_weights
        skipped = self.window.bad or empty or not math.isfinite(norm)
        scale = self.scale.value
        if skipped:
            for key, value in (self.buffers_before or {}).items():
                self.expect(key, value)
        else:
            self._apply(grads, norm)
        self._count("attempts", 1)
        self._count("applied", not skipped)
        if not empty:
            self.scale.update(skipped)
        self.expect(("scale", ""), torch.tensor(self.scale.value, dtype=torch.float64))
        self.reset_window()
        stops = skipped and not empty and self.scale.limit is not None and self.scale.skips >= self.scale.limit
        return Outcome(True, skipped, norm, scale, stops)

    def reset_window(self):
        """Drop the gradients; buffers stay as they are."""
        self.window, self.buffers_before = Window(), None

    # What a step does when it is applied.

    def _apply(self, grads, norm):
        config = self.config
        factor = min(1.0, config.max_norm / norm) if config.max_norm is not None and norm > 0 else 1.0
        for name, (grad, doubt) in grads.items():
            self._update(name, grad * factor, doubt * factor)
        if config.ema is not None:
            for (kind, name), average in list(self.values.items()):
                if kind == "ema":
                    master, slack = self._expected(("master", name))
                    slack = slack * (1 - config.ema) + 2.0**-21 * (average.abs() + master.abs()) + FLOOR
                    self.expect((kind, name), average + (1 - config.ema) * (master - average), slack)
        self._advance_schedulers()

    def _update(self, name, grad, doubt):
        config = self.config
        kind, options = config.rule_of(name)
        optimizer, group = config.place_of(name)
        options = options | {"lr": float(self.values["lr", f"{optimizer}.{group}"])}
        rule, moments = RULES[kind]
        master = self.values["master", name]
        zero = torch.zeros_like(master)
        state = {m: self.values.get((m, name), zero) for m in moments}
        step = float(self.values.get(("step", name), torch.zeros(()))) + 1
        new, after = rule(options, step, master, state, grad)
        # How far the result moves if the gradient is as inexact as it may be: the largest of both ends.
        ends = [rule(options, step, master, state, grad + sign * doubt) for sign in (-1, 1)]
        spread = torch.maximum(*((end - new).abs() for end, _ in ends))
        slack = spread + 2.0**-21 * (master.abs() + new.abs()) + 4e-6 * (new - master).abs() + FLOOR
        dtype = config.stored_dtype(name)
        if dtype is torch.float16:
            slack = slack + 2.0**-40  # the bound of the split below the normal numbers
        if dtype is not None and config.master == "none":
            slack = slack + ulp(new, dtype)
        self.expect(("master", name), new, slack)
        self.expect(("weight", name), new, slack if dtype is None else slack + ulp(new, dtype))
        if ("step", name) in self.values or config.counts_steps(name):
            self.expect(("step", name), torch.tensor(step, dtype=torch.float64))
        for moment in moments:
            spread = torch.maximum(*((end[moment] - after[moment]).abs() for _, end in ends))
            rounding = 2.0**-21 * (state[moment].abs() + after[moment].abs() + _size(moment, grad)) + FLOOR
            stored = stored_slack(moment, after[moment], config.states)
            self.expect((moment, name), after[moment], spread * 1.01 + rounding + stored)

    def _advance_schedulers(self):
        for (kind, place), rate in list(self.values.items()):
            optimizer = int(place.split(".")[0]) if kind == "lr" else None
            if optimizer is None or optimizer not in self.config.scheduled:
                continue
            applied = float(self.values["schedule", ""]) + 1
            new = self.config.next_lr(optimizer, float(rate), applied)
            self.expect((kind, place), torch.tensor(new, dtype=torch.float64), torch.tensor(1e-12 * abs(new)))
        if self.config.scheduled:
            self._count("schedule", 1)

    def expect(self, key, value, slack=None):
        """From now on `key` must be `value`, within `slack`."""
        self.values[key] = value
        self.slack[key] = torch.zeros_like(value) if slack is None else slack

    def _expected(self, key):
        value = self.values[key]
        return value, self.slack.get(key, torch.zeros_like(value))

    def _count(self, counter, change):
        self.expect((counter, ""), self.values[counter, ""] + float(change))


def _size(moment, grad):
    return grad * grad if moment in {"exp_avg_sq", "square_avg"} else grad.abs()
