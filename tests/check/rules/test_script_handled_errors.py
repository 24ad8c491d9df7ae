"""Batches that raise and are skipped: what the lines after the handler do without their gradients."""

import pytest

from check_scripts import findings

CAUGHT = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad({keep})
    try:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
    except {error} as error:
        {handler}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("error", "handler", "keep", "expected"),
    [
        ("RuntimeError", "print(error)", "", [11]),
        ("torch.cuda.OutOfMemoryError", "torch.cuda.empty_cache()", "", [11]),
        ("Exception", "if 'memory' not in str(error): raise", "", [11]),
        ("RuntimeError", "continue", "", []),
        ("RuntimeError", "raise", "", []),
        ("RuntimeError", "recover(x, y)", "", []),
        ("ValueError", "print(error)", "", []),
        ("RuntimeError", "print(error)", "set_to_none=False", []),
    ],
)
def test_a_step_after_a_handled_exception_has_no_gradients(error, handler, keep, expected):
    """HS115 reports the step if the handler continues with it and every gradient is None."""
    text = CAUGHT.format(error=error, handler=handler, keep=keep)
    assert [f.line for f in findings(text, "HS115")] == expected


CHUNKS = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for batch in loader:
    optimizer.zero_grad()
    done = 0
    for x in batch.split(size):
        try:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).sum()
        except RuntimeError:
            torch.cuda.empty_cache()
            {end}
        scaler.scale(loss).backward()
        done += 1
{step}
"""
STEP = "    scaler.step(optimizer)\n    scaler.update()"


@pytest.mark.parametrize(
    ("end", "step", "expected"),
    [
        ("continue", STEP, [15]),
        ("break", STEP, [15]),
        ("raise", STEP, []),
        ("continue", "    if done:\n        scaler.step(optimizer)\n        scaler.update()", []),
        ("continue", f"    if done == 0:\n        continue\n{STEP}", []),
    ],
)
def test_a_batch_may_lose_all_its_chunks(end, step, expected):
    """HS115 reports the step after a loop over chunks whose handler skips the backward, unless the chunks are counted."""
    assert [f.line for f in findings(CHUNKS.format(end=end, step=step), "HS115")] == expected
