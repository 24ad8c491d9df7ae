"""HS170 and HS171 with several scalers, of which the checkpoint contains or restores only some."""

import pytest

from check_scripts import findings

TWO = """\
import torch
from collections import OrderedDict
from types import SimpleNamespace
og = torch.optim.Adam(G.parameters())
od = torch.optim.Adam(D.parameters())
sg = torch.amp.GradScaler("cuda")
sd = torch.amp.GradScaler("cuda")
{objects}
if resume:
    saved = torch.load("last.pt")
    {restore}
for epoch in range(9):
    for x in loader:
        for net, opt, scaler in ():
            pass
        with torch.autocast("cuda", dtype=torch.float16):
            loss = D(x).mean()
        sd.scale(loss).backward()
        sd.step(od)
        sd.update()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = G(x).mean()
        sg.scale(loss).backward()
        sg.step(og)
        sg.update()
    {save}
"""
STATES = 'torch.save({{"og": og.state_dict(), "od": od.state_dict(), {}}}, "last.pt")'
LOADED = 'og.load_state_dict(saved["og"]); od.load_state_dict(saved["od"]); {}'
LOOP = "torch.save({k: v.state_dict() for k, v in objects.items()}, 'last.pt')"
LOAD_LOOP = "for k, v in objects.items(): v.load_state_dict(saved[k])"
SG, SD = '"sg": sg.state_dict()', '"sd": sd.state_dict()'
LOAD_SG, LOAD_SD = 'sg.load_state_dict(saved["sg"])', 'sd.load_state_dict(saved["sd"])'


@pytest.mark.parametrize(
    ("objects", "restore", "save", "codes"),
    [
        ("", LOADED.format(LOAD_SG), STATES.format(SG), ["HS170"]),
        ("", LOADED.format(f"{LOAD_SG}; {LOAD_SD}"), STATES.format(f"{SG}, {SD}"), []),
        ("", LOADED.format(LOAD_SG), STATES.format(f"{SG}, {SD}"), ["HS171"]),
        ("objects = OrderedDict(og=og, od=od, sg=sg)", LOAD_LOOP, LOOP, ["HS170"]),
        ("objects = OrderedDict(og=og, od=od, sg=sg, sd=sd)", LOAD_LOOP, LOOP, []),
        ("objects = {'og': og, 'od': od, 'sd': sd}", LOAD_LOOP, LOOP, ["HS170"]),
        ("objects = register(sd); objects = {'og': og, 'od': od, 'sg': sg}", LOAD_LOOP, LOOP, []),
        ("", LOADED.format("pass"), 'torch.save({"w": G.state_dict()}, "w.pt")', []),
    ],
)
def test_each_of_several_scalers_belongs_to_the_checkpoint(objects, restore, save, codes):
    """A scaler whose uses are all known, and none of which saves it, is missing from a checkpoint with another one."""
    text = TWO.format(objects=objects, restore=restore, save=save)
    assert [f.code for f in findings(text, "HS170", "HS171")] == codes


CLASS = """\
import torch
class GAN:
    def __init__(self, g, d):
        self.opt_g = torch.optim.Adam(g.parameters())
        self.opt_d = torch.optim.Adam(d.parameters())
        self.scaler_g = torch.amp.GradScaler("cuda")
        self.scaler_d = torch.amp.GradScaler("cuda")
    def step(self, opt, scaler, loss):
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    def fit(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                first, second = self.d(x).mean(), self.g(x).mean()
            self.step(self.opt_d, self.scaler_d, first)
            self.step(self.opt_g, self.scaler_g, second)
            self.save("last.pt")
    def save(self, path):
        torch.save({{n: {state} for n in {names}}}, path)
    def load(self, path):
        for n, state in torch.load(path).items():
            getattr(self, n).load_state_dict(state)
"""
BY_NAME = "getattr(self, n).state_dict()"


@pytest.mark.parametrize(
    ("state", "names", "codes"),
    [
        (BY_NAME, '("opt_g", "opt_d", "scaler_g")', []),  # restored by names that the file does not list
        (BY_NAME, '("opt_g", "opt_d", "scaler_g", "scaler_d")', []),
        ("vars(self)[n].state_dict()", "vars(self)", []),
    ],
)
def test_objects_that_are_read_by_computed_names_may_be_any(state, names, codes):
    """`getattr(self, name)` of a name that no literal shows may be the scaler."""
    assert [f.code for f in findings(CLASS.format(state=state, names=names), "HS170", "HS171")] == codes


def test_names_of_a_literal_collection_are_the_objects_that_are_saved():
    """`getattr(self, n).state_dict()` over a literal tuple saves what the tuple names, and no other scaler."""
    names = '("opt_g", "opt_d", "scaler_g")'
    text = CLASS.format(state=BY_NAME, names=names).replace(
        "for n, state in torch.load(path).items()", f"for n, state in zip({names}, torch.load(path))"
    )
    text = text.replace("for n, state in zip", "for n in").replace(", torch.load(path))", "")
    assert [f.code for f in findings(text.replace(f"for n in({names}", f"for n in {names}"), "HS170")] == ["HS170"]
