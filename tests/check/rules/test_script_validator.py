"""HS137 in a validator that gets the trainer whose model it evaluates."""

import pytest

from check_scripts import findings

VALIDATOR = """\
import torch
class {cls}:
    def {method}(self, trainer=None, model=None):
        if trainer is not None:
            model = {model}
            model = model.half() if trainer.amp else model.float()
        for x in self.loader:
            self.update(model(x))
        if trainer is not None:
            model.float()
"""


@pytest.mark.parametrize(
    ("cls", "method", "model", "lines"),
    [
        ("BaseValidator", "__call__", "trainer.ema.ema or trainer.model", [6]),
        ("Metrics", "evaluate", "trainer.model", [6]),
        ("BaseValidator", "__call__", "deepcopy(trainer.model)", []),
        ("BaseValidator", "__call__", "load(trainer.last)", []),
        ("Exporter", "__call__", "trainer.model", []),
    ],
)
def test_a_validator_casts_the_model_of_the_trainer_that_calls_it(cls, method, model, lines):
    """The model of a trainer in another file is in training: a validator that gets the trainer rounds its weights each time."""
    text = VALIDATOR.format(cls=cls, method=method, model=model)
    assert [f.line for f in findings(text, "HS137")] == lines
