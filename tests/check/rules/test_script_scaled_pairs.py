"""HS108: an inner loop over models with their optimizers, which share a scaler and accumulate."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda")
{setup}
for i, x in enumerate(loader):
    for {target} in {source}:
        {start}
        with torch.autocast("cuda", dtype=torch.float16):
            loss = {model}(x).mean() / n
        scaler.scale(loss).backward()
        if {test}:
            scaler.unscale_({optimizer})
            scaler.step({optimizer})
            scaler.update()
            {clear}
"""


def lines(source, target, model, optimizer, test="(i + 1) % n == 0", start="pass", setup="", clear=""):
    """The lines of HS108."""
    text = LOOP.format(
        source=source,
        target=target,
        model=model,
        optimizer=optimizer,
        test=test,
        start=start,
        setup=setup,
        clear=clear or f"{optimizer}.zero_grad()",
    )
    return [f.line for f in findings(text, "HS108")]


ZIPPED = ("zip(models, optimizers)", "model, optimizer", "model", "optimizer")


@pytest.mark.parametrize(
    "names",
    [
        ZIPPED,
        ("pairs", "model, optimizer", "model", "optimizer"),
        ("range(len(models))", "k", "models[k]", "optimizers[k]"),
        ("models.items()", "name, model", "model", "optimizers[name]"),
        ("enumerate(models)", "k, model", "model", "optimizers[k]"),
        ("((a, opt_a), (b, opt_b))", "model, optimizer", "model", "optimizer"),
    ],
)
def test_the_update_of_one_pass_comes_between_the_backwards_of_another(names):
    """Each model has gradients of earlier micro-batches, with the scale before the update."""
    assert len(lines(*names)) == 1
    assert len(lines(*names, test="(i + 1) % n == 0 or i + 1 == len(loader)")) == 1
    start = f"if i % n == 0: {names[3]}.zero_grad()"
    assert len(lines(*names, start=start, clear="pass")) == 1


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        # No window, one that is cleared for each batch, one of the inner loop, one pair, or a scaler for each.
        (ZIPPED, {"test": "True"}),
        (ZIPPED, {"start": "optimizer.zero_grad()"}),
        (("enumerate(parts)", "k, part", "part.model", "part.optimizer"), {"test": "(k + 1) % n == 0"}),
        (("((net, opt),)", "model, optimizer", "model", "optimizer"), {}),
        (("parts", "net, opt, scaler", "net", "opt"), {}),
        (("chunks", "part", "net", "optimizer"), {}),
    ],
)
def test_a_pass_whose_gradients_have_one_scale(names, changes):
    """What a step uses was computed since the update before it."""
    assert lines(*names, **changes) == []
