"""Objects that a function of the file creates and returns."""

import pytest

from check_scripts import reported, script

BUILD = "import torch\ndef build():\n    return torch.amp.GradScaler('cuda')\n{calls}\n"


@pytest.mark.parametrize(
    ("calls", "key"),
    [
        ("scaler = build()", "scaler"),
        ("gs = build() if amp else None", "gs"),
        ("def outer():\n    return build()\nscaler = outer()", "scaler"),
        ("a = build()\nb = build()", "a b"),
        ("use(build())", ""),
    ],
)
def test_a_returned_scaler_belongs_to_the_variable_that_receives_it(calls, key):
    """A function that several variables get a scaler from creates one for each of them."""
    assert [s.key for s in script(BUILD.format(calls=calls)).scalers] == (key.split() or [""])


def test_an_accelerator_of_a_function_owns_the_loop():
    """HS185 reports `loss.backward()` next to an Accelerator that a function creates."""
    text = (
        "from accelerate import Accelerator\ndef build():\n    return Accelerator(mixed_precision='fp16')\naccelerator = build()\n"
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nfor x, y in loader:\n    optimizer.zero_grad()\n"
        "    loss = loss_fn(model(x), y)\n    loss.backward()\n    optimizer.step()\n"
    )
    assert "HS185" in reported(text)
