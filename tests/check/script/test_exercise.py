"""Which files are tests or benchmarks."""

import pytest

from halfstep.check.files.source import Settings, Source
from halfstep.check.registry import words_of_rules
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.script import read_script

TRAINS = "import torch\nmodel = Net()\nloss = model(x)\nloss.backward()\n"
SAVES = TRAINS + "torch.save(model.state_dict(), 'model.pt')\n"


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("train.py", TRAINS, False),
        ("tests/test_train.py", SAVES, True),
        ("tests/train.py", SAVES, True),
        ("test_train.py", TRAINS, True),
        ("scripts/test_train.py", SAVES, False),
        ("scripts/test_train.py", SAVES + "def test_it():\n    pass\n", True),
        ("scripts/test_train.py", "import pytest\n" + SAVES, True),
        ("bench_train.py", SAVES, True),
        ("train_test.py", SAVES, True),
        ("speed_test.py", "trainer = DPOTrainer(model=model)\ntrainer.train()\n", False),
        ("speed_test.py", "import pytest\ntrainer = DPOTrainer(model=model)\ntrainer.train()\n", True),
    ],
)
def test_a_test_is_recognised_by_its_path_and_what_it_saves(path, text, expected):
    """A `test_*.py` that saves its model, and a `*_test.py` with a Trainer, is a run unless it contains tests."""
    script = read_script(Source(path, text, "python"), Settings(), words_of_rules("script"))
    assert is_exercise(script) is expected
