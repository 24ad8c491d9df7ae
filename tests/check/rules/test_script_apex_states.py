"""HS171, HS173, HS191: the state of apex.amp in checkpoints, and Apex where only some of its functions are called."""

import pytest

from check_scripts import findings

APEX = "from apex import amp\n"
HEAD = "import argparse\nimport torch\n{apex}parser = argparse.ArgumentParser()\nparser.add_argument('--scale', default={scale})\nargs = parser.parse_args()\n"
LOOP = """\
model, optimizer = amp.initialize(model, optimizer, opt_level='O1'{options})
{load}
for epoch in range(10):
    for x in loader:
        loss = model(x)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    {save}
"""
LOAD = "checkpoint = torch.load(args.resume)\noptimizer.load_state_dict(checkpoint['optimizer'])"
WEIGHTS = "model.load_state_dict(torch.load(args.resume))"
RESTORE = "amp.load_state_dict(checkpoint['amp'])"
SAVE = "torch.save({'optimizer': optimizer.state_dict()}, path)"
BOTH = "torch.save({'optimizer': optimizer.state_dict(), 'amp': amp.state_dict()}, path)"


def script(load, save, options="", scale="None", apex=APEX):
    text = LOOP.format(options=options, load=load, save=save)
    return HEAD.format(apex=apex, scale=scale) + text


def reported(text, *codes):
    return [(f.code, f.severity) for f in findings(text, *codes)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (script(LOAD, SAVE), ["warning"]),
        (script("", SAVE), ["advice"]),
        (script(LOAD, SAVE, ", loss_scale=args.scale"), ["warning"]),
        (script(LOAD, SAVE, ", loss_scale=args.scale", "'dynamic'"), ["warning"]),
        (script(LOAD, SAVE, ", loss_scale=args.scale", "128.0"), []),
        (script(LOAD, SAVE, ", loss_scale=args.other"), []),
        (script(LOAD, SAVE, ", loss_scale=None"), ["warning"]),
        (script(LOAD + "\nprepare(model, amp)", SAVE), []),
        (script(f"{LOAD}\n{RESTORE}", f"{BOTH}\n    if is_best(epoch):\n        {SAVE}"), ["warning"]),
        (script(f"{LOAD}\n{RESTORE}", f"state = dict(optimizer=optimizer.state_dict())\n    state['amp'] = amp.state_dict()\n    torch.save(state, path)\n    {SAVE}"), []),
        (script(f"{LOAD}\n{RESTORE}", f"state = {{'optimizer': optimizer.state_dict()}}\n    state['amp'] = amp.state_dict()\n    torch.save(state, path)\n    {BOTH}"), []),
        (script(f"{LOAD}\n{RESTORE}", BOTH), []),
        (script(f"{LOAD}\n{RESTORE}", f"if args.apex:\n        {BOTH}\n    else:\n        {SAVE}"), []),
        (script(f"{LOAD}\n{RESTORE}", f"if not args.apex:\n        {SAVE}\n    else:\n        {BOTH}"), []),
        (script(LOAD, SAVE, apex="from project.models import *\n"), ["warning"]),
    ],
)  # fmt: skip
def test_each_checkpoint_has_the_state_of_apex(text, expected):
    """A checkpoint with the optimizer has Apex's dynamic scale too; where nothing restores the optimizer, that is advice."""
    assert reported(text, "HS173") == [("HS173", severity) for severity in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (script(LOAD, BOTH), ["warning"]),
        (script(WEIGHTS, BOTH), ["advice"]),
        (script(WEIGHTS, "state = {'net': model.state_dict()}\n    state['amp'] = amp.state_dict()\n    torch.save(state, path)"), ["advice"]),
        (script(WEIGHTS.replace("resume", "pretrained"), BOTH), []),
        (script(f"{LOAD}\n{RESTORE}", BOTH), []),
        (script(f"{LOAD}\nrestore(checkpoint, amp)", BOTH), []),
        (script(LOAD, "print(amp.state_dict())"), []),
    ],
)  # fmt: skip
def test_a_saved_state_of_apex_is_restored(text, expected):
    """What is saved of Apex is restored where a run resumes, unless another file gets the module."""
    assert reported(text, "HS171") == [("HS171", severity) for severity in expected]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from apex import amp\ntorch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)\n", 1),
        ("from apex import amp\ndef restore(path):\n    amp.load_state_dict(torch.load(path)['amp'])\n", 1),
        ("from models import *\nmodel, optimizer = amp.initialize(model, optimizer, opt_level=args.level)\n", 1),
        ("from .models import *\nwith amp.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()\n", 1),
        ("from models import *\namp = Amplifier()\namp.initialize(model, optimizer)\n", 0),
        ("from models import *\nwith amp.autocast():\n    loss = model(x)\n", 0),
        ("from mxnet.contrib import amp\nwith amp.scale_loss(loss, trainer) as scaled:\n    scaled.backward()\n", 0),
        ("from models import *\nself.amp.initialize(model, optimizer)\n", 0),
        ("from apex import amp\nparams = amp.master_params(o) if self.use_apex else model.parameters()\n", 0),
    ],
)  # fmt: skip
def test_apex_by_any_of_its_functions(text, count):
    """A file that calls a function of apex.amp needs it, also one that a star import of the project binds."""
    assert len(reported("import torch\n" + text, "HS191")) == count


OPTION = "import argparse\nimport torch\nfrom apex import amp\nparser = argparse.ArgumentParser()\nparser.add_argument('--opt-level'{})\nargs = parser.parse_args()\n"
CLIPPED = """\
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
for x in loader:
    with amp.scale_loss(model(x), optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_({}, 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHTS_OF_MODEL, MASTERS = "model.parameters()", "amp.master_params(optimizer)"


@pytest.mark.parametrize(
    ("option", "clipped", "expected"),
    [
        (", type=str", WEIGHTS_OF_MODEL, ["warning"]),
        (", default='O2'", WEIGHTS_OF_MODEL, ["warning"]),
        (", default='O1', choices=['O0', 'O1', 'O2']", WEIGHTS_OF_MODEL, ["warning"]),
        (", default='O1', help='one of O0, O1, O2, O3'", WEIGHTS_OF_MODEL, ["warning"]),
        (", default='O1'", WEIGHTS_OF_MODEL, []),
        (", default='O1', choices=['O0', 'O1']", WEIGHTS_OF_MODEL, []),
        (", type=str", MASTERS, []),
        (", type=str", "head.parameters()", []),
    ],
)
def test_an_option_that_offers_the_level_with_master_weights(option, clipped, expected):
    """With O2 as a choice of the command line, a clip of the model's parameters changes nothing in some runs."""
    text = OPTION.format(option) + CLIPPED.format(clipped)
    assert reported(text, "HS197") == [("HS197", severity) for severity in expected]


BRANCHES = """\
import torch
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level='O2')
for x in loader:
    loss = model(x)
    if args.amp:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    {clip}
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("clip", "count"),
    [
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", 1),
        ("if not args.amp:\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", 0),
        ("torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)", 0),
    ],
)
def test_a_clip_after_either_of_two_backwards(clip, count):
    """The clip comes after the scaled backward in one run and after a plain one in another."""
    assert len(reported(BRANCHES.format(clip=clip), "HS197")) == count
