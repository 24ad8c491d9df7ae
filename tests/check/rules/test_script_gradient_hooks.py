"""HS110 in hooks of the backward pass, and regions that a stack enters under a condition."""

import pytest

from check_scripts import findings

TEXT = """\
import functools
import torch
model = torch.nn.Linear(4, 1).cuda()
opt = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda", enabled={enabled})
{hook}
for x in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
"""
EACH = "for n, p in model.named_parameters():\n    p.{}"
LIMIT = "def limit(grad, v):\n    return grad.clip(-v, v)\n"
POST = "def limit(p):\n    p.grad.clamp_(-1, 1)\n"


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (EACH.format("register_hook(lambda g: g.clamp(-1, 1))"), 1),
        (EACH.format("register_hook(lambda g: torch.clamp(g, -1, 1))"), 1),
        (LIMIT + EACH.format("register_hook(functools.partial(limit, v=1.0))"), 1),
        (POST + EACH.format("register_post_accumulate_grad_hook(limit)"), 1),
        ("model.weight.register_hook(lambda g: log(g.norm()))", 1),
        ("model.weight.register_hook(lambda g: g + torch.randn_like(g))", 1),
        ("model.register_full_backward_hook(lambda m, i, o: log(o[0].norm()))", 1),
        ("model.weight.register_hook(lambda g: g * 0.5)", 0),
        ("model.weight.register_hook(lambda g: g * mask)", 0),
        ("model.weight.register_hook(lambda g: g / g.norm())", 0),
        ("model.weight.register_hook(lambda g: torch.nan_to_num(g))", 0),
        ("model.weight.register_hook(lambda g: g.clamp(-scaler.get_scale(), scaler.get_scale()))", 0),
        ("features.register_hook(lambda g: log(g.norm()))", 0),
        ("model.register_forward_hook(lambda m, i, o: log(o.norm()))", 0),
    ],
)
def test_hooks_get_scaled_gradients(hook, expected):
    """What a hook of the backward pass does with the size of a gradient depends on the loss scale."""
    assert len(findings(TEXT.format(hook=hook, enabled="True"), "HS110")) == expected
    assert not findings(TEXT.format(hook=hook, enabled="False"), "HS110")


SCOPE = """\
import contextlib
import torch
class Trainer:
    def __init__(self, model, optimizer, amp):
        self.model, self.optimizer, self.amp = model, optimizer, amp
    @contextlib.contextmanager
    def scope(self):
        with contextlib.ExitStack() as stack:
            {enter}
            yield
    def forward_backward(self, x):
        loss = self.model(x).mean()
        loss.backward()
    def train(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            with self.scope():
                self.forward_backward(x)
            self.optimizer.step()
"""
ENTER = 'stack.enter_context(torch.autocast("cuda", dtype=torch.bfloat16{}))'


@pytest.mark.parametrize(
    ("enter", "expected"),
    [
        (ENTER.format(""), 1),
        ("if self.amp: " + ENTER.format(""), 1),
        ("if self.amp: " + ENTER.format(", enabled=False"), 0),
        ("if self.amp: stack.enter_context(torch.cuda.device(0))", 0),
    ],
)
def test_a_stack_enters_a_region_under_a_condition(enter, expected):
    """`if amp: stack.enter_context(autocast(...))` is a region with `enabled=amp` around the rest of the stack's block."""
    assert len(findings(SCOPE.format(enter=enter), "HS140")) == expected
