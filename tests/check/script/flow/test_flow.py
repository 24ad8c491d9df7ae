"""Events with their guards, loops and regions."""

import pytest

from check_scripts import script


def events(text, *kinds):
    all_events = [e for t in script(f"import torch\nscaler = torch.amp.GradScaler('cuda')\n{text}").traces for e in t]
    return [e for e in all_events if not kinds or e.kind in kinds]


def test_a_loop_becomes_events_in_order():
    """The calls of a training loop come out in the order they run, inside the loop."""
    text = (
        "for x in data:\n    optimizer.zero_grad()\n    with torch.autocast('cuda'):\n        loss = model(x)\n"
        "    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    all_events = events(text)
    kinds = [e.kind for e in all_events if e.loops]
    assert kinds == [
        "zero_grad", "enter_autocast", "forward", "scale", "backward", "unscale", "clip", "scaler_step", "update",
    ]  # fmt: skip
    assert {len(e.loops) for e in all_events if e.kind == "scaler_step"} == {1}
    assert next(e for e in all_events if e.kind == "backward").scaled == "yes"


@pytest.mark.parametrize(
    ("test", "guards"),
    [
        ("amp", [("amp", True)]),
        ("not amp", [("amp", False)]),
        ("ema is not None", [("ema", True)]),
        ("ema is None", [("ema", False)]),
        ("scaler is not None", []),
        ("amp and clip", [("amp", True), ("clip", True)]),
        ("mode != 'x'", [("mode == 'x'", False)]),
        ("use == True", [("use", True)]),
    ],
)
def test_conditions_become_guards(test, guards):
    """Equivalent conditions give the same guards."""
    (event,) = events(f"if {test}:\n    optimizer.step()\n", "opt_step")
    assert list(event.guards) == guards


@pytest.mark.parametrize(
    ("value", "expected"), [("None", ["opt_b"]), ("torch.amp.GradScaler()", ["opt_a"]), ("make()", ["opt_a", "opt_b"])]
)
def test_a_branch_for_a_scaler_that_never_or_always_exists_is_decided(value, expected):
    """A variable that is only ever None, or only ever a GradScaler, leaves one branch."""
    text = f"s.scaler = {value}\nif s.scaler is not None:\n    opt_a.step()\nelse:\n    opt_b.step()\nx.backward()\n"
    assert [e.optimizer for e in events(text, "opt_step")] == expected


def test_else_and_elif_have_the_opposite_guards():
    """A later branch runs only if the earlier conditions were false."""
    a, b, c = events(
        "if p:\n    opt_a.step()\nelif q:\n    opt_b.step()\nelse:\n    opt_c.step()\nx.backward()\n", "opt_step"
    )
    assert a.guards == (("p", True),)
    assert b.guards == (("p", False), ("q", True))
    assert c.guards == (("p", False), ("q", False))


def test_a_branch_that_leaves_guards_the_rest():
    """After `if bad: continue` the rest of the loop runs only when it was not bad."""
    (event,) = events("for x in data:\n    if bad:\n        continue\n    optimizer.step()\n", "opt_step")
    assert event.guards == (("bad", False),)


def test_conditional_expressions_guard_their_branches():
    """`a() if test else b()` runs one of the two."""
    all_events = events("scaler.scale(loss).backward() if amp else loss.backward()\n", "backward")
    assert sorted((e.scaled, e.guards) for e in all_events) == [("no", (("amp", False),)), ("yes", (("amp", True),))]


@pytest.mark.parametrize(
    ("text", "scaled"),
    [
        ("loss.backward()", "no"),
        ("scaler.scale(loss).backward()", "yes"),
        ("loss = scaler.scale(loss)\nloss.backward()", "yes"),
        ("scaled = scaler.scale(loss / 2)\nscaled.backward()", "yes"),
        ("loss = scaler.scale(loss)\nloss = loss.mean()\nloss.backward()", "maybe"),
        ("if amp:\n    loss = scaler.scale(loss)\nloss.backward()", "maybe"),
        ("(loss * loss_scale).backward()", "maybe"),
        ("loss = scaler.scale(loss) if amp else loss\nlog(loss)\nloss.backward()", "maybe"),
        ("loss = scaler.scale(loss)\nloss = model(x)\nloss.backward()", "no"),
        ("torch.autograd.backward([scaler.scale(a), scaler.scale(b)])", "yes"),
    ],
)
def test_a_scaled_loss_is_followed_through_variables(text, scaled):
    """A backward is scaled, not scaled, or undecided."""
    (event,) = events(text + "\n", "backward")
    assert event.scaled == scaled


@pytest.mark.parametrize(
    "text",
    ["(scaler.scale(loss) if amp else loss).backward()", "x = scaler.scale(loss) if amp else loss\nx.backward()"],
)
def test_a_chosen_loss_is_scaled_on_one_path(text):
    """The two backwards exclude each other, like those of an `if` statement."""
    first, second = events(text + "\n", "backward")
    assert (first.scaled, first.guards) == ("yes", (("amp", True),))
    assert (second.scaled, second.guards) == ("no", (("amp", False),))


@pytest.mark.parametrize(
    "text", ["accelerator.backward(loss)", "self.manual_backward(loss)", "engine.backward(loss)", "self.backward()"]
)
def test_a_frameworks_backward_is_not_a_tensors(text):
    """The backward of a framework is a different event."""
    assert [e.kind for e in events(text + "\nloss.item()\n", "backward", "owned_backward")] == ["owned_backward"]


def test_decorators_are_regions():
    """A function decorated with no_grad or autocast runs inside that region."""
    text = "@torch.no_grad()\n@torch.autocast('cuda')\ndef evaluate():\n    model(x)\n"
    (event,) = events(text, "forward")
    assert event.inside("no_grad")
    assert event.autocast()


def test_a_disabled_region_does_not_count():
    """autocast(enabled=False) inside a region disables it."""
    text = "with torch.autocast('cuda'):\n    with torch.autocast('cuda', enabled=False):\n        loss.backward()\n"
    (event,) = events(text, "backward")
    assert event.autocast() is None
