"""Accelerators, Fabrics and classes that own the training loop: what they are set to and what they prepare."""

import pytest

from check_scripts import script
from halfstep.check.script.objects.engines import engine_at, engines_of, loop_class
from halfstep.check.script.scaling.prepared import prepared_for

ACCELERATE = "import torch\nfrom accelerate import Accelerator\n"
LIGHTNING = "import torch\nimport lightning as L\n"


@pytest.mark.parametrize(
    ("call", "precision"),
    [
        ("Accelerator()", "?"),
        ("Accelerator(mixed_precision='fp16')", "fp16"),
        ("Accelerator(True, False, 'bf16')", "bf16"),
        ("Accelerator(mixed_precision='no')", "fp32"),
        ("Accelerator(mixed_precision=None)", "?"),
        ("Accelerator(mixed_precision=args.mixed_precision)", "?"),
        ("Accelerator(mixed_precision=chosen)", "fp16"),
    ],
)
def test_precision_of_an_accelerator(call, precision):
    """The argument decides the precision; without it the launcher does."""
    (engine,) = engines_of(script(f"{ACCELERATE}chosen = 'fp16'\naccelerator = {call}\n"))
    assert (engine.library, engine.key, engine.precision) == ("Accelerate", "accelerator", precision)


@pytest.mark.parametrize(
    ("options", "precision"),
    [("", "fp32"), ("precision='16-mixed'", "fp16"), ("precision=16", "fp16"), ("precision='bf16-true'", "half")],
)
def test_precision_of_a_fabric(options, precision):
    """Fabric is fp32 unless it is told otherwise, and `-true` has no loss scale."""
    (engine,) = engines_of(script(f"{LIGHTNING}fabric = L.Fabric({options})\n"))
    assert (engine.library, engine.precision) == ("Fabric", precision)


def test_two_accelerators_of_one_name_have_no_known_precision():
    """Where the same name has two precisions, neither is certain."""
    text = f"{ACCELERATE}if a:\n    acc = Accelerator(mixed_precision='fp16')\nelse:\n    acc = Accelerator(mixed_precision='no')\n"
    facts = script(text)
    engine = engine_at(facts, "acc", facts.outline.module)
    assert engine is not None
    assert engine.precision == "?"


def test_the_engine_of_the_own_function_decides():
    """Functions that each create an engine of one name do not share its precision."""
    text = ACCELERATE + "".join(
        f"def {name}():\n    acc = Accelerator(mixed_precision='{name}')\n    loss.backward()\n"
        for name in ("fp16", "bf16")
    )
    facts = script(text)
    for function in facts.outline.functions:
        engine = engine_at(facts, "acc", function)
        assert engine is not None
        assert engine.precision == function.name


def test_steps_of_a_plugin_are_read():
    """gradient_accumulation_plugin sets the accumulation steps like the argument."""
    text = (
        ACCELERATE
        + "from accelerate.utils import GradientAccumulationPlugin\nplugin = GradientAccumulationPlugin(num_steps=4)\n"
        "accelerator = Accelerator(gradient_accumulation_plugin=plugin)\n"
    )
    (engine,) = engines_of(script(text))
    assert engine.steps.value == 4


def test_what_another_function_prepares_is_not_available():
    """A function that prepares nothing and calls no helper that does has plain optimizers."""
    text = (
        ACCELERATE
        + "def plain():\n    accelerator = Accelerator()\n    loss.backward()\n    optimizer.step()\n"
        + "def owned():\n    accelerator = Accelerator()\n    optimizer = accelerator.prepare(optimizer)\n    return score\n"
        + "plain()\nowned()\n"
    )
    facts = script(text)
    (step,) = facts.events("opt_step")
    assert prepared_for(facts, "Accelerate", step).names == frozenset()
    helper = text.replace("return score", "return optimizer").replace(
        "    loss.b", "    optimizer = owned()\n    loss.b"
    )
    facts = script(helper)
    assert all("optimizer" in prepared_for(facts, "Accelerate", e).names for e in facts.events("opt_step"))


@pytest.mark.parametrize(
    ("body", "base"),
    [
        ("pass", "automatic"),
        ("self.automatic_optimization = False", "manual"),
        ("self.automatic_optimization = args.auto", "?"),
    ],
)
def test_mode_of_a_lightning_module(body, base):
    """A module is automatic unless it turns that off; a flag leaves it open."""
    text = f"{LIGHTNING}class Net(L.LightningModule):\n    def __init__(self):\n        {body}\n    def training_step(self, batch):\n        loss.backward()\n"
    assert loop_class(script(text), "Net").base == base


def test_other_classes_own_their_loop():
    """A class without such a base has its own loop."""
    assert (
        loop_class(
            script(f"{LIGHTNING}class Net(torch.nn.Module):\n    def f(self):\n        loss.backward()\n"), "Net"
        )
        is None
    )


@pytest.mark.parametrize(
    ("before", "plugin"),
    [
        ("plugin = DeepSpeedPlugin()\n", "deepspeed"),
        ("plugin = make_plugin()\n", "deepspeed"),
        ("plugin = None\nif args.deepspeed:\n    plugin = DeepSpeedPlugin()\n", ""),
        ("plugin = DeepSpeedPlugin() if args.deepspeed else None\n", ""),
    ],
)
def test_a_plugin_that_an_option_leaves_out_is_none(before, plugin):
    """Without the option the Accelerator trains as if the call named no plugin."""
    text = f"{ACCELERATE}from accelerate import DeepSpeedPlugin\n{before}accelerator = Accelerator(deepspeed_plugin=plugin)\n"
    (engine,) = engines_of(script(text))
    assert engine.plugin == plugin
