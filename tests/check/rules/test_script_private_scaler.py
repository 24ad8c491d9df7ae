"""HS101: a class that wraps a scaler in a private attribute."""

import pytest

from check_scripts import findings

WRAPPER = """\
import torch

class NativeScaler:
    def __init__(self):
        self.{name} = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, need_update=True):
        self.{name}.scale(loss).backward()
        if need_update:
            self.{name}.step(optimizer)
{more}"""
METHOD = "\n    def finish(self):\n        self._scaler.update()\n"


@pytest.mark.parametrize(
    ("name", "more", "expected"), [("_scaler", "", [10]), ("_scaler", METHOD, []), ("scaler", "", [])]
)
def test_nobody_else_updates_a_private_scaler(name, more, expected):
    """A caller may update the scaler of a public attribute, and a method that of a private one."""
    assert [f.line for f in findings(WRAPPER.format(name=name, more=more), "HS101")] == expected
