"""What simulated runs get through: tables of formats, rejected values, the script's own contexts, folds and wide windows."""

import pytest

from simulated_scripts import codes

PLAIN = """\
{setup}
optimizer = torch.optim.AdamW(model.parameters())
for step, (x, y) in enumerate(loader):
    with {region}:
        loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LIBRARY_MODEL = "from models import create_model\nmodel = create_model(args)\n"


def plain(region, setup=LIBRARY_MODEL):
    """A loop without a scaler, whose forward runs in this region."""
    return PLAIN.format(region=region, setup=setup)


@pytest.mark.parametrize(
    ("region", "setup"),
    [
        ("torch.autocast('cuda', dtype={'bf16': torch.bfloat16, 'fp16': torch.float16}[args.dtype])", LIBRARY_MODEL),
        ("{'bf16': torch.autocast('cuda', dtype=torch.bfloat16), 'fp16': torch.autocast('cuda', dtype=torch.float16)}[args.dtype]", LIBRARY_MODEL),
        ("torch.autocast('cuda', dtype=TABLE.get(args.dtype))", LIBRARY_MODEL + "TABLE = {'bf16': torch.bfloat16, 'fp16': torch.float16}"),
        ("torch.autocast(device_type=device.type)", LIBRARY_MODEL + "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')"),
        ("torch.autocast(device_type=args.device)", LIBRARY_MODEL),
        ("precision()", LIBRARY_MODEL + "@contextlib.contextmanager\ndef precision():\n    with torch.autocast('cuda', dtype=torch.float16):\n        yield\n"),
        ("torch.autocast('cuda', dtype=named(args.dtype))", LIBRARY_MODEL + "def named(dtype):\n    if dtype == 'bf16':\n        return torch.bfloat16\n    if dtype == 'fp16':\n        return torch.float16\n    raise ValueError(dtype)\n"),
        ("torch.autocast('cuda', dtype=torch.float16)", "model = BUILDERS[args.model](args)"),
    ],
    ids=["table", "table-of-regions", "get", "device", "unknown-device", "context-manager", "rejected-values", "model-of-a-table"],
)  # fmt: skip
def test_a_run_in_float16_is_found(region, setup):
    """One of the values that the script accepts trains in float16 without a scaler."""
    assert codes(plain(region, setup)) == ["HS123"]


@pytest.mark.parametrize(
    ("region", "setup"),
    [
        ("torch.autocast('cuda', dtype={'bf16': torch.bfloat16, 'fp32': torch.float32}[args.dtype])", LIBRARY_MODEL),
        ("torch.autocast(device_type='cpu')", LIBRARY_MODEL),
        ("torch.autocast(device_type=device.type)", LIBRARY_MODEL + "device = torch.device('cpu')"),
        ("contextlib.nullcontext() if args.device != 'cuda' else torch.autocast('cuda', dtype=torch.bfloat16)", LIBRARY_MODEL),
        ("precision()", LIBRARY_MODEL + "@contextlib.contextmanager\ndef precision():\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n        yield\n"),
        ("torch.autocast('cuda', dtype=named(args.dtype))", LIBRARY_MODEL + "def named(dtype):\n    if dtype == 'bf16':\n        return torch.bfloat16\n    raise ValueError(dtype)\n"),
    ],
    ids=["table", "cpu", "cpu-device", "bf16-on-cuda", "context-manager", "rejected-values"],
)  # fmt: skip
def test_runs_without_float16_are_silent(region, setup):
    """No value that the script accepts computes in float16."""
    assert codes(plain(region, setup)) == []


def test_a_region_in_the_forward_of_the_script_s_own_module_counts():
    """The region of a submodule is that of the loss."""
    text = """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body = Body()
            def forward(self, x):
                with torch.autocast("cuda", dtype=torch.float16):
                    return self.body(x)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        """
    assert codes(text) == ["HS123"]
    assert codes(text.replace("torch.float16", "torch.bfloat16")) == []


SCALED = """\
def main(fold):
    model = create(args)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    for step, (x, y) in enumerate(loader):
        with torch.autocast("cuda", {region}):
            loss = model(x, y) / 32
        scaler.scale(loss).backward()
        if (step + 1) % 32 == 0:
            {unscale}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

{launch}
"""


def scaled(enabled="True", region="dtype=torch.float16", unscale="scaler.unscale_(optimizer)", launch="main(0)"):
    """A loop with a window of 32 micro-batches."""
    return SCALED.format(enabled=enabled, region=region, unscale=unscale, launch=launch)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (scaled(), []),
        (scaled(unscale="pass"), ["HS104"]),
        (scaled(unscale="pass", launch="for fold in range(5):\n    main(fold)"), ["HS104"]),
        (scaled(unscale="pass", launch="import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)"), ["HS104"]),
        (scaled(unscale="pass", launch="if __name__ == '__main__':\n    main(0)"), ["HS104"]),
        (scaled(unscale="pass", launch="if not torch.cuda.is_available():\n    print('no GPU')\n    exit()\nmain(0)"), ["HS104"]),
        (scaled(enabled="args.fp16", region="enabled=args.fp16"), []),
        (scaled(enabled="args.fp16", region="dtype=torch.float16"), ["HS123"]),
        (scaled(enabled="dtype == torch.float16", region="dtype=dtype").replace("    model =", "    dtype = {'fp16': torch.float16, 'bf16': torch.bfloat16}[args.dtype]\n    model =", 1), []),
    ],
    ids=["right", "wide-window", "folds", "spawned", "main", "exit", "one-setting", "region-always-on", "one-table"],
)  # fmt: skip
def test_windows_folds_and_launches(text, expected):
    """A window wider than the loop runs here ends, folds replace their optimizer, and spawned functions run."""
    assert codes(text) == expected
