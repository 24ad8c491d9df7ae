"""HS136: regions that are the second arm of a choice."""

import pytest

from check_scripts import findings

SAMPLES = """\
from contextlib import nullcontext
import torch

class Sampler:
    def sample(self, model, batch):
        context = {choice}
        with context():
            return model.generate(batch)
"""
AUTOCAST = "torch.cuda.amp.autocast"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (f"nullcontext if not self.bf16 else {AUTOCAST}", 1),
        (f"{AUTOCAST} if self.bf16 else nullcontext", 1),
        (f"nullcontext if not self.was_cast_to_bf16 else {AUTOCAST}", 1),
        (f"{AUTOCAST} if not self.bf16 else nullcontext", 0),  # float16 where bfloat16 is not asked for
        (f"nullcontext if not self.amp else {AUTOCAST}", 0),
        (f"nullcontext if not self.bf16 else functools.partial({AUTOCAST}, dtype=torch.bfloat16)", 0),
        (f"{AUTOCAST} if not self.bf16 else functools.partial({AUTOCAST}, dtype=torch.bfloat16)", 0),
    ],
)
def test_a_region_in_the_second_arm(choice, expected):
    """`nullcontext if not bf16 else autocast` enters the region where bfloat16 is asked for, like the choice the other way round."""
    assert len(findings("import functools\n" + SAMPLES.format(choice=choice), "HS136")) == expected
