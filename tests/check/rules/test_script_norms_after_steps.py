"""HS110: gradients that are measured after a step that only some micro-batches take."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda")
def measure(net):
    return sum(p.grad.norm() ** 2 for p in net.parameters() if p.grad is not None) ** 0.5
for epoch in range(9):
    for i, x in enumerate(loader):
{before}
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean() / n
        scaler.scale(loss).backward()
        if {test}:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
{clear}
{then}
"""
EACH = """\
        for name, p in model.named_parameters():
            if p.grad is not None:
                norms[name].append(p.grad.norm().item())"""
CLEAR = "            optimizer.zero_grad()"
TESTS = ["(i + 1) % n == 0", "(i + 1) % n == 0 or i + 1 == len(loader)", "not (i + 1) % n"]


def lines(then, test=TESTS[0], before="        pass", clear=CLEAR):
    """The lines of HS110."""
    return [f.line for f in findings(LOOP.format(then=then, test=test, before=before, clear=clear), "HS110")]


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize(
    ("then", "line"),
    [
        (EACH, 18),
        ("        log(measure(model))", 16),
        ("        if args.log_norms:\n            log(measure(model))", 17),
        ("        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])", 16),
    ],
)
def test_micro_batches_without_a_step_leave_scaled_gradients(then, line, test):
    """The step clears or unscales the gradients of the others only."""
    assert lines(then, test) == [line]
    assert lines(then, test, clear="            pass") == [line]


@pytest.mark.parametrize("test", TESTS[:2])
def test_a_log_in_the_first_micro_batch_of_a_window(test):
    """`i % k == 0` is true for 0, where a window of several micro-batches never ends."""
    assert lines("        if i % args.log_every == 0:\n            log(measure(model))", test) == [17]


@pytest.mark.parametrize(
    ("then", "changes"),
    [
        # Within the window, in the same iterations or others, after every window, and after a step in each iteration.
        ("            log(measure(model))\n            optimizer.zero_grad()", {"clear": "            pass"}),
        ("        if (i + 1) % n == 0:\n            log(measure(model))", {"clear": "            pass"}),
        ("        if (i + 1) % args.log_every == 0:\n            log(measure(model))", {}),
        ("        if step_count > seen:\n            log(measure(model))", {}),
        ("    log(measure(model))", {}),
        ("        log(measure(model))", {"test": "not args.debug"}),
        ("        ok = is_finite(measure(model))", {"test": "args.accumulation_steps == 1"}),
    ],
)
def test_where_the_step_may_have_come_first(then, changes):
    """What is measured may be the unscaled gradients of the step."""
    assert lines(then, **changes) == []
