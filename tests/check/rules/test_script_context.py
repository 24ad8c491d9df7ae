"""HS136 and HS148: regions without the dtype that is asked for, and which of two contexts joined by `and` or `or` is entered."""

import contextlib

import pytest
import torch

from check_scripts import findings

AUTOCAST = 'torch.autocast("cpu", dtype=torch.bfloat16)'
JOINED = [
    (f"{AUTOCAST} and torch.no_grad()", "no_grad"),
    (f"torch.no_grad() and {AUTOCAST}", "autocast"),
    (f"torch.no_grad() or {AUTOCAST}", "no_grad"),
    (f"torch.inference_mode() and torch.no_grad() and {AUTOCAST}", "autocast"),
    (f"(torch.no_grad() and {AUTOCAST} if torch else torch.no_grad())", "autocast"),
]


def messages(contexts):
    return [f.message for f in findings(f"import torch\nwith {contexts}:\n    y = model(x)\n", "HS148")]


@pytest.mark.parametrize(("contexts", "entered"), JOINED)
def test_message_names_the_entered_context(contexts, entered):
    """The message names the context that Python enters, and one that it does not."""
    (message,) = messages(contexts)
    first, _, second = message.partition(" is entered, ")
    assert entered in first
    assert second.endswith("is not")
    with eval(contexts):
        assert torch.is_autocast_enabled("cpu") == (entered == "autocast")
        assert torch.is_grad_enabled() == (entered == "autocast")


@pytest.mark.parametrize(
    "contexts",
    [
        f"torch.no_grad(), {AUTOCAST}",
        f"use_amp and {AUTOCAST} or contextlib.nullcontext()",
        f"{AUTOCAST} or contextlib.nullcontext()",
        f"({AUTOCAST} if use_amp else contextlib.nullcontext())",
        f"context or {AUTOCAST}",
        "torch.set_grad_enabled(train and torch.is_grad_enabled()), torch.no_grad()",
        f"run(torch.no_grad() and {AUTOCAST})",
    ],
)
def test_choice_between_contexts_is_silent(contexts):
    """A flag, a default or a conditional expression that chooses a context gives no finding."""
    assert messages(contexts) == []


def test_context_managers_are_truthy():
    """Contexts define no truth value, so `and` evaluates to the last and `or` to the first."""
    assert all(map(bool, (torch.no_grad(), torch.autocast("cpu"), torch.inference_mode(), contextlib.nullcontext())))


def test_inference_mode_includes_no_grad():
    """Where inference_mode is entered, a no_grad that is not changes nothing; an autocast that is not does."""
    assert messages(f"torch.no_grad() and torch.inference_mode(), {AUTOCAST}") == []
    assert len(messages(f"torch.inference_mode() and torch.no_grad(), {AUTOCAST}")) == 1
    assert len(messages(f"{AUTOCAST} and torch.inference_mode()")) == 1


REGION = "import torch\n{flag}\nfor x in loader:\n    with torch.autocast('cuda'{dtype}{enabled}):\n        loss = model(x)\n"


@pytest.mark.parametrize(
    ("flag", "enabled", "expected"),
    [
        ("", ", enabled=args.use_bf16", 1),
        ("", ", enabled=cfg['bf16']", 1),
        ("amp = cfg.precision in ('fp16', 'bf16')", ", enabled=amp", 1),
        ("amp = str(cfg.get('precision', 'no')).lower() == 'bf16'", ", enabled=amp", 1),
        ("amp = cfg.precision == 'fp16'", ", enabled=amp", 0),
        ("bf16_layers = 3", ", enabled=args.amp", 0),
        ("assert cfg.precision in ('no', 'fp16', 'bf16')", ", enabled=cfg.precision != 'no'", 1),
        ("dtype = torch.bfloat16 if cfg['amp'] == 'bf16' else torch.float32", ", enabled=cfg['amp'] != 'fp32'", 1),
        ("parser.add_argument('--mixed-precision', choices=['no', 'bf16'])", ", enabled=a.mixed_precision != 'no'", 1),
        ("parser.add_argument('--mixed-precision', choices=['no', 'fp16'])", ", enabled=a.mixed_precision != 'no'", 0),
        ("assert cfg.weights in ('no', 'bf16')", ", enabled=cfg.precision != 'no'", 0),  # another setting
        ("assert cfg.precision in ('fp16', 'bf16')", ", enabled=cfg.device != 'cpu'", 0),
        ("torch.set_autocast_dtype('cuda', torch.bfloat16)", ", enabled=args.bf16", 0),
    ],
)
def test_a_region_that_an_option_for_bfloat16_enables_needs_its_dtype(flag, enabled, expected):
    """Without a dtype the region is in float16; with one, or with another default, it is what the option asks for."""
    text = REGION.format(flag=flag, dtype="", enabled=enabled)
    assert len(findings(text, "HS136")) == expected
    assert findings(REGION.format(flag=flag, dtype=", dtype=torch.bfloat16", enabled=enabled), "HS136") == []


def test_a_region_of_the_other_branch_is_not_for_bfloat16():
    """A region that is entered only where the setting is not bf16 needs no dtype."""
    text = "import torch\nif cfg.amp == 'bf16':\n    run_bf16()\nelif cfg.amp != 'no':\n    with torch.autocast('cuda'):\n        y = model(x)\n"
    assert findings(text, "HS136") == []


TRAINER = """\
import torch
from contextlib import nullcontext
from transformers import Trainer
class CastTrainer({base}):
    def {name}(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        context = torch.autocast("cuda") if self.is_cast_to_bf16 else nullcontext()
        with context:
            return {body}
"""


@pytest.mark.parametrize(
    ("base", "name", "body", "expected"),
    [
        ("Trainer", "compute_loss", "self.loss_of(model, inputs)", 0),
        ("Trainer", "compute_loss", "model.generate(**inputs)", 1),
        ("Trainer", "compute_reference", "self.loss_of(model, inputs)", 1),
        ("object", "compute_loss", "self.loss_of(model, inputs)", 1),
    ],
)
def test_the_model_of_a_trainer_computes_in_a_region_of_its_own(base, name, body, expected):
    """HS136: the Trainer's bf16 region is the inner one for a forward; the one around `generate` decides."""
    assert len(findings(TRAINER.format(base=base, name=name, body=body), "HS136")) == expected
