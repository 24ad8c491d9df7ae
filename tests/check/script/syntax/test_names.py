"""Imports and aliases."""

import ast

import pytest

from check_scripts import script
from halfstep.check.script.syntax.names import chain, key_of


def expression(text):
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("imports", "use", "full"),
    [
        ("import torch", "torch.cuda.amp.autocast", "torch.cuda.amp.autocast"),
        ("import torch.cuda.amp as amp", "amp.autocast", "torch.cuda.amp.autocast"),
        ("from torch.cuda import amp", "amp.GradScaler", "torch.cuda.amp.GradScaler"),
        ("from torch.cuda.amp import GradScaler as GS", "GS", "torch.cuda.amp.GradScaler"),
        ("from torch.cuda.amp import *", "autocast", "torch.cuda.amp.autocast"),
        ("from torch.cuda.amp.grad_scaler import GradScaler", "GradScaler", "torch.cuda.amp.GradScaler"),
        ("import torch", "torch.autocast", "torch.amp.autocast"),
        ("import torch", "torch.half", "torch.float16"),
        ("autocast = torch.cuda.amp.autocast", "autocast", "torch.cuda.amp.autocast"),
        ("from .engine import autocast", "autocast", ".engine.autocast"),
        ("from trl.trainer.dpo_trainer import Any, autocast, nn", "autocast", "torch.amp.autocast"),
        ("from trl.trainer.dpo_trainer import nn", "nn", "trl.trainer.dpo_trainer.nn"),
        ("import numpy as np", "autocast", ""),
    ],
)
def test_a_use_resolves_to_its_full_name(imports, use, full):
    """However a name is imported, it resolves to one full name; an unknown name has none."""
    assert script(f"{imports}\nautocasting = float16\n").outline.names.full(expression(use)) == full


def test_two_imports_of_one_name_are_ambiguous():
    """A name bound by more than one import may be either."""
    text = "try:\n    from torch.amp import autocast\nexcept ImportError:\n    from torch.cuda.amp import autocast\n"
    assert script(text).outline.names.ambiguous(expression("autocast"))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("scaler", "scaler"),
        ("self.scaler", "self.scaler"),
        ("opts[0]", "opts[0]"),
        ("opts['g'].inner", "opts['g'].inner"),
        ("opts[i]", "opts[i]"),
        ("opts[i + 1]", ""),
        ("make()", ""),
    ],
)
def test_a_variable_has_its_text_as_key(text, key):
    """Names, attributes and plain subscripts are variables; anything computed is not."""
    assert key_of(expression(text)) == key


def test_a_chain_is_read_from_left_to_right():
    """The names of a chain are in the order of the text, and a call is not a chain."""
    assert chain(expression("a.b.c")) == ("a", "b", "c")
    assert chain(expression("a().b")) == ()
