"""HS190: the fix of deprecated names, argument by argument."""

import pytest

from check_scripts import apply, findings


def fixed(text):
    fixable = [f for f in findings(text, "HS190") if f.fix]
    for finding in reversed(fixable):
        text = apply(text, finding.fix)
    return text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.cuda.amp.autocast()", 'torch.amp.autocast("cuda")'),
        ("torch.cuda.amp.autocast(amp)", 'torch.amp.autocast("cuda", enabled=amp)'),
        ("torch.cuda.amp.autocast(amp, torch.half)", 'torch.amp.autocast("cuda", enabled=amp, dtype=torch.half)'),
        (
            "torch.cuda.amp.autocast(amp, torch.half, False)",
            'torch.amp.autocast("cuda", enabled=amp, dtype=torch.half, cache_enabled=False)',
        ),
        ("torch.cuda.amp.autocast(enabled=amp)", 'torch.amp.autocast("cuda", enabled=amp)'),
        ("torch.cpu.amp.autocast()", 'torch.amp.autocast("cpu")'),
        ("torch.cuda.amp.GradScaler()", 'torch.amp.GradScaler("cuda")'),
        ("torch.cuda.amp.GradScaler(2**10, 2.0)", 'torch.amp.GradScaler("cuda", 2**10, 2.0)'),
        ("torch.cuda.amp.GradScaler((2**10))", 'torch.amp.GradScaler("cuda", (2**10))'),
        ("torch.cuda.amp.GradScaler(enabled=amp)", 'torch.amp.GradScaler("cuda", enabled=amp)'),
    ],
)
def test_arguments_keep_their_meaning(old, new):
    """Each positional argument of the old call becomes the same argument of the new one."""
    assert fixed(f"import torch\nx = {old}\n") == f"import torch\nx = {new}\n"


@pytest.mark.parametrize("call", ["torch.cuda.amp.autocast(*args)", "torch.cuda.amp.GradScaler(**options)"])
def test_unpacked_arguments_give_no_fix(call):
    """A call with unpacked arguments is reported without a fix."""
    (finding,) = findings(f"import torch\nx = {call}\n", "HS190")
    assert finding.fix is None


def test_one_import_and_all_its_uses_change_together():
    """An import line of several names is changed once, with every use of them."""
    text = (
        "from torch.cuda.amp import GradScaler, autocast\nimport torch\nscaler = GradScaler(512.0)\n"
        "def step(x, flag):\n    with autocast(flag):\n        return model(x)\n"
    )
    assert fixed(text) == (
        'from torch.amp import GradScaler, autocast\nimport torch\nscaler = GradScaler("cuda", 512.0)\n'
        'def step(x, flag):\n    with autocast("cuda", enabled=flag):\n        return model(x)\n'
    )


def test_import_of_other_names_gives_no_fix():
    """An import of a name that torch.amp does not have is reported without a fix."""
    (finding,) = findings("from torch.cuda.amp import autocast, common\nwith autocast():\n    pass\n", "HS190")
    assert finding.fix is None


def test_a_name_imported_twice_is_left_alone():
    """Where several imports bind one name, changing one of them would break the uses of the other."""
    text = (
        "def a():\n    from torch.cuda import amp\n    return amp.GradScaler()\n"
        "def b():\n    from torch.cuda import amp\n    return amp.GradScaler()\n"
    )
    assert [f.fix for f in findings(text, "HS190")] == [None, None]


def test_fallback_import_is_silent():
    """Code that tries torch.amp first gives no finding."""
    text = (
        "try:\n    from torch.amp import autocast\nexcept ImportError:\n    from torch.cuda.amp import autocast\n"
        "with autocast('cuda'):\n    pass\n"
    )
    assert findings(text, "HS190") == []


@pytest.mark.parametrize(
    "text",
    [
        "s = torch.amp.GradScaler('cuda') if NEW else torch.cuda.amp.GradScaler()\nprint(s)\n",
        "if NEW:\n    s = torch.amp.GradScaler('cuda')\nelse:\n    s = torch.cuda.amp.GradScaler()\nprint(s)\n",
        "def autocast(on):\n    if NEW:\n        return torch.amp.autocast('cuda', enabled=on)\n    return torch.cuda.amp.autocast(on)\n",
    ],
)
def test_version_check_is_silent(text):
    """The old name in one branch and the new one in another support older versions on purpose."""
    assert findings("import torch\n" + text, "HS190") == []


def test_mixed_names_in_a_long_function_are_reported():
    """A training function that mixes both names is not a choice between versions."""
    text = "import torch\ndef main():\n    s = torch.amp.GradScaler('cuda')\n" + "    f(s)\n" * 9
    assert findings(
        text + "    with torch.cuda.amp.autocast():\n        pass\n    t = torch.cuda.amp.GradScaler()\n", "HS190"
    )


def test_unused_import_is_silent():
    """An import without a use gives no finding, because it emits no warning."""
    assert findings("from torch.cuda.amp import autocast\n", "HS190") == []


def test_decorators_without_parentheses_get_them():
    """`@custom_bwd` becomes a call with the device type."""
    text = "import torch\n@torch.cuda.amp.custom_bwd\ndef backward(ctx, g):\n    return g\n"
    assert '@torch.amp.custom_bwd(device_type="cuda")\n' in fixed(text)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("autocast = torch.cuda.amp.autocast if amp else suppress\nwith autocast(): pass\n", [2]),
        ("make = torch.cuda.amp.GradScaler\nscaler = make()\n", [2]),
        ("from torch.cuda.amp import autocast\nctx = autocast if amp else suppress\nwith ctx(): pass\n", [2]),
        ("try:\n    cast = torch.amp.autocast\nexcept AttributeError:\n    cast = torch.cuda.amp.autocast\n", []),
        ("cast = torch.autocast if new else torch.cuda.amp.autocast\n", []),
        ("if new:\n    cast = partial(torch.amp.autocast, 'cuda')\nelse:\n    cast = torch.cuda.amp.autocast\n", []),
    ],
)
def test_a_deprecated_name_under_another_name_is_still_deprecated(text, lines):
    """A class that is assigned and called later is reported without a fix, unless the new one may be assigned too."""
    reports = findings("import torch\n" + text, "HS190")
    assert [f.line for f in reports] == lines
    assert not any(f.fix for f in reports)


@pytest.mark.parametrize(
    ("test", "count"),
    [
        ("device.type == 'cuda'", 1),
        ("torch.cuda.is_available()", 1),
        ("version >= (2, 4)", 0),
        ("hasattr(torch, 'amp')", 0),
    ],
)
def test_a_branch_by_device_is_no_fallback(test, count):
    """The old name for one device and the new one for the others is not a choice by version."""
    text = (
        f"import torch\nif {test}:\n    c = torch.cuda.amp.autocast()\nelse:\n    c = torch.amp.autocast(device.type)\n"
    )
    assert len(findings(text, "HS190")) == count


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("from lib import *\nwith T.cuda.amp.autocast():\n    y = model(x)\n", [2]),
        ("def scaler(th):\n    return th.cuda.amp.GradScaler()\n", [2]),
        ("from lib import *\nwith T.amp.autocast('cuda'):\n    y = model(x)\n", []),
        ("import torch\nclass Scaler(torch.cuda.amp.GradScaler):\n    pass\n", [2]),
        ("import torch\nclass Scaler(torch.amp.GradScaler):\n    pass\n", []),
        ("import torch as th\nx = 1\nscaler = th.cuda.amp.GradScaler()\n", [3]),
    ],
)
def test_the_old_names_of_a_module_from_elsewhere_and_in_a_base(text, lines):
    """A module without an import here, a base class, and torch under another name: the finding is where it is used."""
    assert [f.line for f in findings(text, "HS190")] == lines


def test_torch_under_another_name_is_fixed_in_place():
    """The alias of torch stays."""
    text = "import torch as th\nscaler = th.cuda.amp.GradScaler()\n"
    (finding,) = findings(text, "HS190")
    assert 'th.amp.GradScaler("cuda")' in apply(text, finding.fix)


UNSET = """\
import torch
def train(args, model, loader, use_fp16):
    {lines}
    return scaler
"""
IF = "if {test}:\n        scaler = torch.amp.GradScaler('cuda')\n    {other}:\n        scaler = torch.cuda.amp.GradScaler(enabled=use_fp16)"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (IF.format(test="use_fp16 and hasattr(torch.amp, 'GradScaler')", other="else"), [6]),
        (IF.format(test="hasattr(torch, 'amp') and hasattr(torch.amp, 'GradScaler') and args.fp16", other="else"), [6]),
        (
            "scaler = torch.amp.GradScaler('cuda') if args.fp16 and hasattr(torch.amp, 'GradScaler')"
            " else torch.cuda.amp.GradScaler(enabled=False)",
            [3],
        ),
        (IF.format(test="hasattr(torch, 'amp') and hasattr(torch.amp, 'GradScaler')", other="else"), []),
        (IF.format(test="use_fp16 and hasattr(torch.amp, 'GradScaler')", other="elif use_fp16"), []),
        (
            "has_new = hasattr(torch.amp, 'GradScaler')\n    "
            + IF.format(test="has_new and TORCH_VERSION >= (2, 3)", other="else"),
            [],
        ),
        (
            "has_new = hasattr(torch.amp, 'GradScaler')\n    "
            + IF.format(test="has_new and hasattr(torch, 'amp')", other="else"),
            [],
        ),
    ],
)
def test_a_setting_that_is_off_reaches_the_fallback_in_every_version(lines, expected):
    """HS190 reports the `else` of `fp16 and hasattr(torch.amp, ...)`: without fp16 a new torch warns there too."""
    assert [f.line for f in findings(UNSET.format(lines=lines), "HS190")] == expected
