"""HS122: a scaler whose name every function that reads it binds to one of its own."""

import pytest

from check_scripts import findings

LOOP = """\
{pad}for x in loader:
{pad}    optimizer.zero_grad()
{pad}    with torch.autocast("cuda", dtype=torch.float16):
{pad}        loss = model(x).mean()
{pad}    scaler.scale(loss).backward()
{pad}    scaler.step(optimizer)
{pad}    scaler.update()
"""
IN_FUNCTION = LOOP.format(pad="    ")
IN_METHOD = LOOP.format(pad="        ")
NEW = "scaler = torch.amp.GradScaler('cuda')"


def lines(text):
    """The lines of HS122."""
    return [f.line for f in findings("import torch\n" + text, "HS122")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{NEW}\ndef train(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}train(m, l, o)\n", [2]),
        (
            f"def train(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}\n"
            f"def main(model, loader, optimizer):\n    {NEW}\n    train(model, loader, optimizer)\nmain(m, l, o)\n",
            [13],
        ),
        (
            f"if __name__ == '__main__':\n    {NEW}\n    Trainer().fit(m, l, o)\n"
            f"class Trainer:\n    def fit(self, model, loader, optimizer):\n        {NEW}\n{IN_METHOD}",
            [3],
        ),
        (
            f"{NEW}\ndef train(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}"
            "def resume(scaler, state):\n    scaler.load_state_dict(state)\n",
            [2],
        ),
    ],
)
def test_a_scaler_that_no_function_reads_is_left_over(text, expected):
    """The one that trains is created in the function; the other one has no effect."""
    assert lines(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"{NEW}\ndef train(model, loader, optimizer):\n{IN_FUNCTION}train(m, l, o)\n",
        f"def train(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}def tune(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}",
        # Read by a function that has none of its own, as a default, by another name or as an attribute.
        f"{NEW}\ndef train(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}def tune(model, loader, optimizer):\n{IN_FUNCTION}",
        f"{NEW}\ndef train(model, loader, optimizer, used=scaler):\n    {NEW}\n{IN_FUNCTION}",
        f"{NEW}\ndef train(model, loader, optimizer, scaler=scaler):\n{IN_FUNCTION}def tune(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}",
        f"{NEW}\nkept = scaler\ndef train(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}",
        f"{NEW}\ndef train(model, loader, optimizer):\n    global scaler\n    {NEW}\n{IN_FUNCTION}",
        f"{NEW}\ndef train(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}save(globals()['scaler'])\n",
        f"class Shared:\n    {NEW}\ndef train(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}save(Shared.scaler)\n",
        # A closure reads the scaler around it.
        f"def main(model, loader, optimizer):\n    {NEW}\n    def step(loss):\n        scaler.scale(loss).backward()\n"
        f"    run(step)\ndef train(model, loader, optimizer):\n    {NEW}\n{IN_FUNCTION}",
    ],
)
def test_a_scaler_that_something_may_read_is_kept(text):
    """Each function has its own, or the outer one is read."""
    assert lines(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"def train(model, loader, optimizer, scaler=None):\n{IN_FUNCTION}"
            f"def main(model, loader, optimizer):\n    {NEW}\n    train(model, loader, optimizer, scaler=None)\n",
            [11],
        ),
        (
            f"def train(model, loader, optimizer, scaler=None):\n{IN_FUNCTION}"
            f"def main(model, loader, optimizer):\n    {NEW}\n    train(model, loader, optimizer, scaler=scaler)\n",
            [],
        ),
        (
            "def fit(model, loader, optimizer, scaler=None):\n    scaler = scaler or torch.amp.GradScaler('cuda')\n"
            "    for x in loader:\n        model(x).mean().backward()\n        optimizer.step()\n        optimizer.zero_grad()\n",
            [3],
        ),
        (
            "def make():\n    scaler = torch.amp.GradScaler('cuda')\n    def step(loss):\n        scaler.scale(loss).backward()\n    return step\n"
            f"def train(model, loader, optimizer, scaler):\n{IN_FUNCTION}",
            [],
        ),
    ],
)
def test_a_function_never_reads_its_scaler(text, expected):
    """A variable that its function never reads, except to create it, is unused, whatever others have under its name."""
    assert lines(text) == expected
