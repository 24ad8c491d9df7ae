"""Code as other people write it: checkpoints, masks, loss modules, several losses; each with a fault whose place is known."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.engine.engine import Engine
from halfstep.scaling.scaler import LossScaler
from halfstep.watching.skips import Autopsies


def autopsy_of(model, compute, precision="fp32", **options):
    """The autopsy of one step; `compute` returns a loss or several."""
    watch = Autopsies()
    scaler = LossScaler(init_scale=2.0**10) if precision == "fp16" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer, precision, watch=watch, scaler=scaler, **options)
    with engine.forward():
        losses = compute()
    losses = losses if isinstance(losses, list) else [losses]
    for number, loss in enumerate(losses):
        engine.backward(loss, retain_graph=number + 1 < len(losses))
    assert engine.step(replay=compute).skipped
    engine.close()
    (autopsy,) = watch.autopsies
    return autopsy


class Multiplied(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Leaky(nn.Module):
    """A layer and an identity that ruins the gradient."""

    def __init__(self, factor):
        super().__init__()
        self.inner, self.factor = nn.Linear(4, 4), factor

    def forward(self, x):
        return Multiplied.apply(self.inner(x), self.factor)


class Checkpointed(nn.Module):
    """Three blocks, each computed again in the backward pass; the second may ruin its gradient."""

    def __init__(self, reentrant, whole, factor=math.inf):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Leaky(factor if i == 1 else 1.0) for i in range(3))
        self.reentrant, self.whole = reentrant, whole

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x * 2

    def forward(self, x):
        x = self.stem(x)
        if self.whole:
            return checkpoint(self.run, x, use_reentrant=self.reentrant)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_module_inside_a_checkpoint_is_named(reentrant, whole):
    """A re-entrant checkpoint is one node, whose own backward pass has the culprit."""
    torch.manual_seed(0)
    model = Checkpointed(reentrant, whole)
    x = torch.randn(3, 4)
    autopsy = autopsy_of(model, lambda: model(x).square().mean())
    assert (autopsy.cause, autopsy.module) == ("backward", "blocks.1")
    assert autopsy.op.startswith("multiplied")


@pytest.mark.parametrize("reentrant", [False, True])
def test_code_of_a_checkpoint_outside_any_child_belongs_to_the_module_that_called_it(reentrant):
    """sqrt at 0 in a function that is checkpointed itself."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(lambda h: (h - h.detach()).sqrt(), self.stem(x), use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(4, 4), Net())
    x = torch.randn(3, 4)
    autopsy = autopsy_of(model, lambda: model(x).mean())
    assert (autopsy.cause, autopsy.module, autopsy.op) == ("backward", "1", "sqrt (backward)")


class Masked(nn.Module):
    """Attention weights with a mask of -inf, made in the way that the argument has."""

    def __init__(self, made, *, everywhere):
        super().__init__()
        self.inner, self.made = nn.Linear(4, 4), made
        blocked = torch.ones(4, 4, dtype=torch.bool).triu(1)
        blocked[2] |= everywhere
        self.register_buffer("blocked", blocked)

    def forward(self, x):
        scores = self.inner(x) @ x.T
        if self.made == "filled":
            scores = scores.masked_fill(self.blocked, -math.inf)
        elif self.made == "added":
            scores = scores + torch.zeros(4, 4).masked_fill_(self.blocked, -math.inf)
        else:
            scores = scores + torch.where(self.blocked, -math.inf, 0.0)
        return torch.softmax(scores / 0.5, -1) @ x


@pytest.mark.parametrize("made", ["filled", "added", "where"])
def test_a_row_that_is_masked_everywhere_is_the_fault_of_the_softmax(made):
    """The mask is legitimate in other rows, so it is not named."""
    model = nn.Sequential(nn.Linear(4, 4), Masked(made, everywhere=True))
    x = torch.randn(4, 4)
    autopsy = autopsy_of(model, lambda: model(x).mean())
    assert (autopsy.cause, autopsy.module, autopsy.op) == ("forward", "1", "_softmax")
    assert "masked with -inf everywhere" in autopsy.sentence


@pytest.mark.parametrize("made", ["filled", "added", "where"])
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_mask_is_not_named_for_a_gradient_that_overflows_behind_it(made, factor):
    """Masks are made between operations with gradients, and the softmax has absorbed them."""
    model = nn.Sequential(Leaky(factor), Masked(made, everywhere=False))
    x = torch.randn(4, 4)
    autopsy = autopsy_of(model, lambda: model(x).square().mean())
    assert (autopsy.cause, autopsy.module) == ("backward", "0")


def test_operations_without_gradients_do_not_count_as_those_of_the_node_before():
    """-inf made right after the layer whose gradient overflows."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = Multiplied.apply(self.inner(x), math.nan)
            mask = torch.full((4,), -1.0).log2().nan_to_num(0.0) - torch.tensor([0.0, 0.0, 0.0, 1.0]) / 0.0
            return y + mask.exp().nan_to_num(0.0)

    model = Net()
    x = torch.randn(3, 4)
    autopsy = autopsy_of(model, lambda: model(x).mean())
    assert (autopsy.cause, autopsy.module, autopsy.op) == ("backward", "", "multiplied (backward)")


def test_a_loss_module_that_the_forward_creates_counts_as_the_forward():
    """As in transformers; the note has its class."""

    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x, y):
            return nn.MSELoss()(self.inner(x), y)

    model = Scored()
    x, y = torch.randn(3, 4), torch.tensor([[0.0], [math.nan], [1.0]])
    autopsy = autopsy_of(model, lambda: model(x, y))
    assert (autopsy.cause, autopsy.module) == ("data", "")
    assert any("MSELoss" in note for note in autopsy.notes)


def test_losses_that_share_a_graph_are_measured_one_by_one():
    """The first is healthy, the second has an infinite gradient at a shared layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4)

    def compute():
        y = model(x)
        return [y.square().mean(), (y - y.detach()).sqrt().sum(), y.mean()]

    autopsy = autopsy_of(model, compute)
    assert (autopsy.cause, autopsy.module, autopsy.op) == ("backward", None, "sqrt (backward)")


def test_memory_that_is_written_in_parts_is_not_data():
    """torch.empty may contain NaN where nothing was written yet."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)
            out = torch.empty(2, *y.shape)
            out.untyped_storage().copy_(torch.full((2, *y.shape), math.nan).untyped_storage())
            out[torch.tensor([0])] = y * 3e38 * 1e3
            out[torch.tensor([1])] = y
            return out.sum(0)

    model = nn.Sequential(nn.Linear(4, 4), Net())
    x = torch.randn(3, 4)
    autopsy = autopsy_of(model, lambda: model(x).mean())
    assert (autopsy.cause, autopsy.module, autopsy.op) == ("forward", "1", "mul")


def test_a_cast_that_overflows_reads_as_one():
    """Data beyond the range of fp16, cast by autocast in the first layer."""
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.full((2, 4), 1e6)
    autopsy = autopsy_of(model, lambda: F.relu(model(x)).mean(), "fp16")
    assert (autopsy.cause, autopsy.module) == ("forward", "0")
    assert autopsy.sentence.startswith(
        "the cast to float16 in module 0 overflowed in the forward pass: inputs up to 1e+06 gave inf"
    )


CONSTANT = {
    "assigned": lambda y: y.clone().index_put_((torch.tensor([0]),), torch.tensor(math.nan)),
    "indexed": lambda y: _assigned(y, math.inf),
    "filled": lambda y: y.masked_fill(torch.eye(3, 4) > 0, math.nan),
    "multiplied": lambda y: y * math.nan,
    "tensor": lambda y: y * torch.tensor([1.0, math.nan, 1.0, 1.0]),
    "where": lambda y: torch.where(y > y.min(), y, math.nan),
}


def _assigned(y, value):
    y = y.clone()
    y[y > y.min()] = value
    return y


@pytest.mark.parametrize("change", CONSTANT)
def test_a_constant_in_the_code_of_a_module_is_a_fault_of_that_module(change):
    """No batch has it: data is what entered from outside."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[1].register_forward_hook(lambda module, args, y: CONSTANT[change](y))
    x = torch.randn(3, 4)
    autopsy = autopsy_of(model, lambda: model(x).mean())
    assert (autopsy.cause, autopsy.module) == ("forward", "1")


def test_a_derivative_that_the_loss_takes_belongs_to_the_module_that_it_is_of():
    """torch.autograd.grad in the loss: its operations run there, and are those of the layer that they differentiate."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].register_forward_hook(lambda module, args, y: y + (y - y.detach()).square().sum().sqrt())
    x = torch.randn(3, 2)

    def compute():
        at = x.clone().requires_grad_()
        slope = torch.autograd.grad(model(at).sum(), at, create_graph=True)[0]
        return slope.square().mean()

    autopsy = autopsy_of(model, compute)
    assert (autopsy.cause, autopsy.module) == ("forward", "1")


@pytest.mark.parametrize("precision", ["bf16", "fp16-lean"])
def test_a_scalar_of_the_batch_is_data(precision):
    """A gain or a temperature has no dimension, as a number in the code has none, and is not one."""
    model, gain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), torch.tensor(math.inf)
    model[0].register_forward_hook(lambda module, args, y: y * gain)
    x = torch.randn(3, 4)
    autopsy = autopsy_of(model, lambda: model(x).float().mean(), precision)
    assert (autopsy.cause, autopsy.module) == ("data", "0")


def test_a_model_that_the_user_compiled_is_replayed_in_eager_mode_too():
    """torch.compile(model) before the Engine gets it; modules have the names of the model inside."""
    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    x = torch.full((3, 4), math.nan)
    autopsy = autopsy_of(model, lambda: model(x).mean())
    torch._dynamo.reset()
    assert (autopsy.cause, autopsy.module) == ("data", "0")
    assert autopsy.notes[-1].startswith("compiled code was replayed in eager mode")


def _fill(param):
    param.grad.fill_(math.inf)


HOOKS = {
    "backward hook": lambda m: m.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * math.nan,)),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * math.inf,)),
    "gradient hook": lambda m: m.weight.register_hook(lambda gradient: gradient * math.nan),
    "accumulated": lambda m: m.weight.register_post_accumulate_grad_hook(_fill),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_the_module_of_a_hook_that_ruins_a_gradient_is_named(hook):
    """Hooks of modules and of parameters, before and after the accumulation."""
    model = nn.Sequential(*(nn.Linear(3, 1 if i == 2 else 3, bias=False) for i in range(3)))
    HOOKS[hook](model[1])
    x = torch.randn(4, 3)
    autopsy = autopsy_of(model, lambda: model(x).mean())
    assert (autopsy.cause, autopsy.module) == ("backward", "1")


def test_a_python_number_is_shown_among_the_inputs():
    """Without it a product of 1 that overflows would be a riddle."""
    model = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    autopsy = autopsy_of(model, lambda: (model(x).abs() + 2).mean() * 3e38)
    assert (autopsy.cause, autopsy.module, autopsy.op) == ("forward", None, "mul")
    assert "the number 3e+38" in str(autopsy)
