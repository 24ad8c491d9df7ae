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


FALLBACK = """\
import torch
scaler = torch.amp.GradScaler("cuda")
def train_by_hand(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        {unscale}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
CALLED = """\
def main(model, optimizer, loader):
    try:
        Trainer(model).fit(loader)
    except ImportError:
        train_by_hand(model, optimizer, loader)
main(model, optimizer, loader)
"""
IN_PLACE = """\
import torch
scaler = torch.amp.GradScaler("cuda")
def main(model, optimizer, loader):
    try:
        return Trainer(model).fit(loader)
    except TypeError:
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()
            {unscale}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
"""
RETRY = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    try:
        train(x, y)
    except RuntimeError:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        {unscale}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("text", "unscale", "expected"),
    [
        (FALLBACK + CALLED, "", [10]),
        (FALLBACK + CALLED, "scaler.unscale_(optimizer)", []),
        (IN_PLACE, "", [13]),
        (IN_PLACE, "scaler.unscale_(optimizer)", []),
        (RETRY, "", []),
    ],
)
def test_a_training_loop_in_a_handler_is_a_loop(text, unscale, expected):
    """HS104 judges a loop that runs where the Trainer is missing; what a handler does in an iteration is left alone."""
    assert [f.line for f in findings(text.format(unscale=unscale), "HS104")] == expected
