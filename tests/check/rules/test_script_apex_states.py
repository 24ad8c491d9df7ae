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
