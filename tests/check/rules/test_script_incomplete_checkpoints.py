"""HS170 where one checkpoint of a script has the scaler and another one, which a run may resume from, does not."""

import pytest

from check_scripts import findings

TEXT = """\
import torch
{helper}
def train(model, opt, scaler, loader, resume):
    if resume:
        saved = torch.load(resume)
        opt.load_state_dict(saved["opt"])
        if "scaler" in saved:
            scaler.load_state_dict(saved["scaler"])
    for epoch in range(9):
        for i, x in enumerate(loader):
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            {inside}
        {after}
train(net, torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cuda"), data, path)
"""
FULL = 'torch.save({"opt": opt.state_dict(), "scaler": scaler.state_dict()}, "a.pt")'
EMERGENCY = 'def emergency(opt):\n    state = {}\n    state["opt"] = opt.state_dict()\n    torch.save(state, "b.pt")\n'
PACK = 'def pack(opt):\n    return {"opt": opt.state_dict()}\n'
SPREAD = "def snapshot(path, **parts):\n    torch.save({k: v.state_dict() for k, v in parts.items()}, path)\n"
OPTIONAL = (
    "def write(path, opt, scaler=None):\n    state = {'opt': opt.state_dict()}\n    if scaler is not None:\n"
    "        state['scaler'] = scaler.state_dict()\n    torch.save(state, path)\n"
)


@pytest.mark.parametrize(
    ("helper", "inside", "after", "expected"),
    [
        ("", 'torch.save(dict(opt=opt.state_dict(), epoch=epoch), "b.pt")', FULL, 1),
        (EMERGENCY, "emergency(opt)", FULL, 1),
        (EMERGENCY.replace("torch.save", "state['scaler'] = None; torch.save"), "emergency(opt)", FULL, 0),
        (PACK, 'torch.save(pack(opt), "b.pt")', FULL, 1),
        (PACK, 'torch.save({**pack(opt), "scaler": scaler.state_dict()}, "b.pt")', FULL, 0),
        (SPREAD, 'snapshot("b.pt", opt=opt)', 'snapshot("a.pt", opt=opt, scaler=scaler)', 1),
        (SPREAD, 'snapshot("b.pt", opt=opt, scaler=scaler)', 'snapshot("a.pt", opt=opt, scaler=scaler)', 0),
        (OPTIONAL, 'write("b.pt", opt)', 'write("a.pt", opt, scaler)', 1),
        (OPTIONAL, 'write("b.pt", opt, scaler=scaler)', 'write("a.pt", opt, scaler)', 0),
        ("", 'state = dict(opt=opt.state_dict()); state["scaler"] = scaler.state_dict(); torch.save(state, "b.pt")', FULL, 0),
        ("", 'state = dict(opt=opt.state_dict()); torch.save({**state, "scaler": 0}, "b.pt")', FULL, 0),
        ("", 'torch.save(dict(weights=model.state_dict()), "b.pt")', FULL, 0),
    ],
)  # fmt: skip
def test_every_checkpoint_with_the_optimizer_needs_the_scaler(helper, inside, after, expected):
    """Whatever builds the dictionary, a checkpoint with the optimizer and without the scaler is one to resume from."""
    text = TEXT.format(helper=helper, inside=inside, after=after)
    assert len(findings(text, "HS170")) == expected
