"""HS123: a dtype that is None, for which autocast on CUDA takes float16, while the scaler is off."""

import pytest

from check_scripts import findings

TABLE = 'dtype = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}[cfg.dtype]'
GET = (
    'table = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}\n'
    '    dtype = table.get(cfg.amp.get("dtype", "float32"), None)'
)
CHAIN = 'dtype = torch.float16 if cfg.dtype == "fp16" else torch.bfloat16 if cfg.dtype == "bf16" else None'
OPTION = "dtype = torch.float16 if cfg.fp16 else None"

# Read from the setting of another file, so that nothing but the text decides.
ENABLED = """\
import torch
def train(cfg, model, loader, optimizer):
    {dtype}
    amp = {amp}
    scaler = torch.amp.GradScaler("cuda", enabled={flag})
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast({device}, dtype=dtype, enabled=amp):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
CREATED = """\
import torch
def train(cfg, model, loader, optimizer):
    {dtype}
    amp = {amp}
    use_scaler = {flag}
    scaler = torch.amp.GradScaler("cuda") if use_scaler else None
    for x, y in loader:
        with torch.autocast({device}, dtype=dtype, enabled=amp):
            loss = model(x, y)
        if {test}:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
"""
HALF = "dtype == torch.float16"


def reported(text, dtype, amp="cfg.amp.enabled", flag=HALF, device='"cuda"', test="scaler is not None"):
    """The lines of HS123 in the text, without those that the dtype takes."""
    written = text.format(dtype=dtype, amp=amp, flag=flag, device=device, test=test)
    return [f.line - dtype.count("\n") for f in findings(written, "HS123")]


@pytest.mark.parametrize("dtype", [TABLE, GET, CHAIN, OPTION])
def test_none_where_the_scaler_is_off(dtype):
    """A table, its method `get`, and a chain of choices; the scaler is disabled, or is not created."""
    assert reported(ENABLED, dtype) == [8]
    assert reported(CREATED, dtype) == [8]


@pytest.mark.parametrize(
    "changes",
    [
        {"amp": "True"},
        {"flag": f"cfg.amp.enabled and {HALF}"},
        {"test": "use_scaler"},
        {"device": '"cuda", cache_enabled=True'},
    ],
)
def test_none_in_other_words(changes):
    """A region that is always on, a flag of two parts, and a test of the flag."""
    assert reported(CREATED, TABLE, **changes) == [8]


@pytest.mark.parametrize(
    "changes",
    [
        {"amp": "dtype is not None"},
        {"amp": "bool(dtype)"},
        {"amp": "cfg.amp and dtype in (torch.float16, torch.bfloat16)"},
        {"amp": 'cfg.dtype != "float32"'},
        {"amp": "False"},
        {"device": '"cpu"'},
        {"dtype": '{"float16": torch.float16, "bfloat16": torch.bfloat16}[cfg.dtype]'},
        {"dtype": 'dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[cfg.dtype]'},
        {"dtype": "dtype = torch.float16 if torch.cuda.is_available() else None"},
        {"dtype": TABLE + '\n    if cfg.dtype == "float32":\n        raise ValueError(cfg.dtype)'},
        {"flag": "dtype != torch.bfloat16"},
    ],
)
@pytest.mark.parametrize("text", [ENABLED, CREATED])
def test_none_that_the_region_knows(text, changes):
    """The region is off for None, on the CPU, the dtype is never None, None is rejected, or the scaler is on for it."""
    assert reported(text, **{"dtype": TABLE, **changes}) == []
