"""The moves of a random run on a real Engine, each next to what the reference makes of it; and how a failure is shortened."""

import contextlib
import copy
import dataclasses
import math

import torch

from fuzz_moves import Config, batch, program
from fuzz_reference import Illegal, ulp
from fuzz_restarts import Restarts
from fuzz_run import Mismatch, check, losses_of
from halfstep.errors import OverflowStop, SettingError

__all__ = ["Config", "Driver", "Mismatch", "replay", "shrink"]


class Abort(Exception):
    """Raised inside a forward or backward, as user code would."""


class Driver(Restarts):
    """A run that can be moved: one method per move."""

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
                self.reference.may_backward(kind, number, has_graph=loss.requires_grad)
            except Illegal:
                self.rejected(
                    lambda loss=loss, r=retain: self.engine.backward(loss, _typed(kind, number), retain_graph=r)
                )
                continue
            self.captured.clear()
            multipliers = []
            loss.register_hook(lambda grad, out=multipliers: out.append(float(grad)))
            self.engine.backward(loss, _typed(kind, number), retain_graph=retain)
            multiplier = multipliers[0]
            # Ranks agree on a new weight one window late; until then a loss may be multiplied by more.
            if self.union is None and multiplier > self.reference.scale.value:
                raise Mismatch(f"the loss was multiplied by {multiplier:g}, more than the loss scale")
            self.reference.backward(self.captured, multiplier, kind, number)
            healthy = 0 <= self.reference.window.weight < math.inf
            if healthy and not math.isfinite(multiplier):
                raise Mismatch(f"the loss was multiplied by {multiplier}")
            # In 16 bits large inputs saturate tanh, and its gradient is rounding error.
            exact_enough = size <= 1 or self.config.precision.startswith("fp32")
            if poison is None and healthy and multiplier and exact_enough:
                self.check_gradients(losses_of(exact, target.double())[i], multiplier, retain=retain)

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
        share = 2e-5 if self.config.precision.startswith("fp32") else 0.5
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
        if not self.reference.window.bad and self.reference.window.total:
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
        self.reference.reset_window()
        if self.gradients():
            raise Mismatch("gradients left after reset_window()")

    def forward_only(self, seed, fails):
        """A forward whose output is not used, or that raises."""
        self.forward(batch(seed)[0], spare=False)
        with contextlib.suppress(Abort), self.engine.forward():
            if fails:
                raise Abort

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

    def evaluate(self, seed, ema, saves=False, fails=False):
        """Validation changes nothing, and uses the weights or the EMA; a state taken in it has the trained weights."""
        x = batch(seed)[0]
        if ema and self.config.ema is None:
            return self.rejected(lambda: self.engine.evaluate(ema=True).__enter__())
        grads = self.gradients()
        state = None
        with contextlib.suppress(Abort), self.engine.evaluate(ema=ema):
            y = self.model(x, spare=True)
            if saves and not self.reference.window.has_gradients:
                state = self.engine.state_dict()["model"]
                state = {name: state[name].double() for name in self.params}
            if fails:
                raise Abort
        for name, weight in (state or {}).items():
            check(
                f"weight {name} in a state taken in evaluate(ema={ema})", weight, self.reference.values["weight", name]
            )
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
        if grads.keys() != after.keys() or not all(
            torch.equal(g, after[n]) for n, g in grads.items() if g.isfinite().all()
        ):
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

    def illegal(self, call):
        """A call that is rejected in every state."""
        engine, loss = self.engine, self.params["first.weight"].float().pow(2).sum()
        state = (
            {}
            if self.reference.window.has_gradients or not call.startswith("state")
            else copy.deepcopy(engine.state_dict())
        )
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


def _typed(kind, number):
    if kind == "tensor":
        # Any dtype and shape with one element will do.
        return torch.full((1,), number, dtype=torch.float64) if number == 37.0 else torch.tensor(number)
    return {None: lambda _: None, "int": int, "float": float}[kind](number)


def _spoil(grad):
    grad = grad.clone()
    grad.view(-1)[0] = math.nan
    return grad


def _abort(_grad):
    raise Abort


def replay(config, moves, make=Driver, **options):
    """Run the moves; raise with the move at fault."""
    run = make(config, **options)
    for number, (name, arguments) in enumerate(moves):
        try:
            getattr(run, name)(**arguments)
            run.compare()
        except Exception as error:
            error.add_note(f"in move {number}: {name} {arguments}")
            raise
    run.engine.close()


def shrink(config, moves):
    """A failing run with as few moves and settings as possible, as a program with its error; None if it passes."""
    failure = _failure(config, moves)
    if failure is None:
        return None
    best = [config, moves, failure]

    def attempt(config, moves):
        failure = _failure(config, moves)
        same = failure is not None and failure.split(":")[0] == best[2].split(":")[0]
        if same:
            best[:] = config, moves, failure
        return same

    size = len(moves)
    while size:
        start = 0
        while start < len(best[1]):
            if not attempt(best[0], best[1][:start] + best[1][start + size :]):
                start += size
        size //= 2
    for number in range(len(best[1])):
        for option in ("weight", "losses", "spare", "size", "poison", "last", "precision", "disk", "shuffle", "edit"):
            name, options = best[1][number]
            plain = {key: value for key, value in options.items() if key != option}
            if plain != options:
                attempt(best[0], [*best[1][:number], (name, plain), *best[1][number + 1 :]])
    for field in dataclasses.fields(config):
        if (
            field.name in {"accumulate", "max_norm", "ema", "schedules"}
            and getattr(config, field.name) != field.default
        ):
            attempt(dataclasses.replace(best[0], **{field.name: field.default}), best[1])
    return f"{program(*best[:2])}\n# {best[2]}"


def _failure(config, moves):
    try:
        replay(config, moves)
    except Exception as error:
        return f"{type(error).__name__}: {error} " + " ".join(getattr(error, "__notes__", []))
    return None
