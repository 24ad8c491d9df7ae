"""The values of expressions."""

import ast

import pytest

from check_scripts import script
from halfstep.check.script.objects.values import constant


def region(expression, before=""):
    facts = script(f"import torch\nfrom functools import partial\n{before}\nwith {expression}:\n    loss = model(x)\n")
    events = [e for t in facts.traces for e in t if e.kind == "enter_autocast"]
    return events[0].regions[-1].autocasts if events else ()


@pytest.mark.parametrize(
    ("expression", "device", "dtype", "enabled"),
    [
        ("torch.autocast('cuda')", "cuda", "float16", "yes"),
        ("torch.autocast('cpu')", "cpu", "bfloat16", "yes"),
        ("torch.autocast(device_type=d)", None, None, "yes"),
        ("torch.autocast('cuda', torch.bfloat16)", "cuda", "bfloat16", "yes"),
        ("torch.cuda.amp.autocast()", "cuda", "float16", "yes"),
        ("torch.cuda.amp.autocast(False)", "cuda", "float16", "no"),
        ("torch.cuda.amp.autocast(amp, torch.bfloat16)", "cuda", "bfloat16", "amp"),
        ("torch.cuda.amp.autocast(enabled=args.amp)", "cuda", "float16", "args.amp"),
        ("torch.autocast('cuda', dtype=a if b else torch.float16)", "cuda", None, "yes"),
    ],
)
def test_an_autocast_call_is_read(expression, device, dtype, enabled):
    """Device, number format and switch are read from either API, by position or keyword, with its defaults."""
    (autocast,) = region(expression)
    assert (autocast.device, autocast.dtype, autocast.enabled) == (device, dtype, enabled)


@pytest.mark.parametrize(
    "before",
    [
        "ctx = torch.autocast('cuda', dtype=torch.bfloat16)",
        "ctx = torch.autocast('cuda', dtype=torch.bfloat16) if amp else nullcontext()",
        "dt = torch.bfloat16\nctx = torch.autocast('cuda', dtype=dt)",
        "def make():\n    return torch.autocast('cuda', dtype=torch.bfloat16)\nctx = make()",
    ],
)
def test_a_context_in_a_variable_is_followed(before):
    """A region assigned to a variable, under a flag or by a helper, keeps its settings."""
    (autocast,) = region("ctx", before)
    assert autocast.dtype == "bfloat16"


def test_a_partial_is_called_later():
    """`partial(torch.autocast, ...)` opens its region when it is called."""
    (autocast,) = region("ctx()", "ctx = partial(torch.autocast, 'cuda', dtype=torch.bfloat16)")
    assert autocast.dtype == "bfloat16"


def test_options_are_read_from_their_dictionary():
    """`**options` has the values of its dictionary; an entry added later is unknown."""
    before = "options = {'device_type': 'cuda', 'enabled': amp}\n"
    (plain,) = region("torch.autocast(**options)", before)
    (later,) = region("torch.autocast(**options)", before + "if dt:\n    options['dtype'] = dt\n")
    assert (plain.device, plain.dtype, plain.enabled) == ("cuda", "float16", "amp")
    assert (later.device, later.dtype, later.enabled) == ("cuda", None, "amp")


def test_two_possible_formats_are_no_answer():
    """A format chosen by a branch is left open."""
    (autocast,) = region(
        "torch.autocast('cuda', dtype=d)", "if a:\n    d = torch.float16\nelse:\n    d = torch.bfloat16"
    )
    assert autocast.dtype is None
    assert autocast.dtypes == {"float16", "bfloat16"}


@pytest.mark.parametrize(
    "other", ["model.no_sync()", "te.fp8_autocast(enabled=True)", "open(path)", "maybe_autocast(x)"]
)
def test_other_contexts_are_not_autocast(other):
    """Contexts that are not torch's autocast open no region."""
    assert region(other) == ()


@pytest.mark.parametrize(
    ("made", "key", "enabled"),
    [
        ("scaler = torch.cuda.amp.GradScaler()", "scaler", "yes"),
        ("scaler = torch.amp.GradScaler('cuda', enabled=False)", "scaler", "no"),
        ("scaler = torch.amp.GradScaler(enabled=args.amp)", "scaler", "args.amp"),
        ("scaler = torch.amp.GradScaler('cuda') if amp else None", "scaler", "amp"),
        ("self.s = torch.amp.GradScaler('cuda', 2.0, 2.0, 0.5, 100, use)", "self.s", "use"),
        ("amp = False\nscaler = torch.amp.GradScaler(enabled=amp)", "scaler", "no"),
        ("use(torch.amp.GradScaler('cuda'))", "", "yes"),
    ],
)
def test_a_scaler_is_read(made, key, enabled):
    """The variable of a scaler and whether it is enabled follow from its assignment and arguments."""
    (scaler,) = script(f"import torch\n{made}\n").scalers
    assert (scaler.key, scaler.enabled) == (key, enabled)


@pytest.mark.parametrize(("text", "value"), [("2**10", 1024), ("-1e9", -1e9), ("x", ...), ("10**10**10", ...)])
def test_literals_are_computed_within_reason(text, value):
    """Powers and signs of literals are evaluated; names and towers of powers are not."""
    assert constant(ast.parse(text, mode="eval").body) == value
