"""Simulated runs look for methods in the order in which Python does."""

import pytest

from simulated_scripts import codes

TRAINERS = """
class Base:
    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")
    def backward(self, loss):
        self.scaler.scale(loss).backward()
    def before_step(self):
        pass
    def train(self):
        for batch in loader:
            for x in batch.chunk(4):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.model(x)
                self.backward(loss / 4)
            self.before_step()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

{classes}

Last(create()).train()
"""
WRONG = "    def backward(self, loss):\n        {super}.backward(loss)\n        self.scaler.unscale_(self.optimizer)\n"
RIGHT = "    def before_step(self):\n        {super}.before_step()\n        self.scaler.unscale_(self.optimizer)\n"
CLASSES = {
    "one": "class Last(Base):\n{body}",
    "grandchild": "class Clipping(Base):\n{body}\nclass Last(Clipping):\n    def log(self): ...\n",
    "middle": "class Clipping(Base):\n{body}\nclass Last(Clipping):\n    def backward(self, loss):\n        super().backward(loss)\n",
    "mixin": "class Clipping:\n{body}\nclass Last(Clipping, Base):\n    pass\n",
    "diamond": "class First(Base):\n    def backward(self, loss):\n        super().backward(loss)\nclass Clipping(Base):\n{body}\nclass Last(First, Clipping):\n    pass\n",
}


@pytest.mark.parametrize("classes", CLASSES.values(), ids=CLASSES)
def test_super_continues_after_the_class_of_the_method(classes):
    """`super()` in a class between others calls the next one, whatever class the object is of."""
    for body, expected in ((WRONG, ["HS106"]), (RIGHT, [])):
        text = TRAINERS.format(classes=classes.format(body=body.format(super="super()")))
        assert codes(text) == expected
        named = text.replace(
            "super().backward(loss)\n        self", "super(Clipping, self).backward(loss)\n        self"
        )
        assert "class Clipping" not in named or codes(named) == expected
