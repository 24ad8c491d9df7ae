"""HS170: the fix that saves and restores the scaler."""

from check_scripts import apply, findings

LOOP = """\
for x in loader:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def fixed(text):
    (finding,) = findings(text, "HS170")
    return apply(text, finding.fix) if finding.fix else None


def test_new_entry_follows_the_layout_of_the_dictionary():
    """In a dictionary with one entry per line the new entry has its own line and a key like the optimizer's."""
    text = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\n"
        + LOOP
        + "torch.save({\n    'model_state_dict': model.state_dict(),\n    'optimizer_state_dict': optimizer.state_dict(),\n}, f)\n"
        + "state = torch.load(f)\noptimizer.load_state_dict(state['optimizer_state_dict'])\n"
    )
    new = fixed(text)
    assert (
        "    'optimizer_state_dict': optimizer.state_dict(),\n    'scaler_state_dict': scaler.state_dict(),\n}" in new
    )
    assert new.endswith("if state.get('scaler_state_dict'):\n    scaler.load_state_dict(state['scaler_state_dict'])\n")
    assert findings(new, "HS170", "HS171") == []


def test_methods_of_the_class_use_its_scaler():
    """`self.scaler` is saved and restored by the methods of its class."""
    text = (
        "import torch\nclass T:\n    def __init__(self):\n        self.scaler = torch.amp.GradScaler('cuda', enabled=amp)\n"
        "    def run(self):\n        for x in self.data:\n            self.scaler.scale(self.model(x)).backward()\n"
        "            self.scaler.step(self.opt)\n            self.scaler.update()\n"
        "    def save(self):\n        torch.save({'o': self.opt.state_dict()}, f)\n"
        "    def load(self, s):\n        self.opt.load_state_dict(s['o'])\n"
    )
    assert "'o': self.opt.state_dict(), 'scaler': self.scaler.state_dict()}" in fixed(text)


def test_unreachable_scaler_gives_no_fix():
    """There is no fix if the scaler is not in the scope of the saving function, or may be None."""
    helper = "def save():\n    torch.save({'o': optimizer.state_dict()}, f)\ndef load(s):\n    optimizer.load_state_dict(s['o'])\n"
    local = "import torch\ndef main():\n    scaler = torch.amp.GradScaler('cuda')\n" + "".join(
        f"    {line}\n" for line in LOOP.splitlines()
    )
    maybe = "import torch\nscaler = torch.amp.GradScaler('cuda') if amp else None\n" + LOOP
    assert fixed(local + helper) is None
    assert fixed(maybe + helper) is None
