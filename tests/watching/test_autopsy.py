"""The value that an autopsy is."""

import json

from halfstep.watching.autopsy import Autopsy
from halfstep.watching.probes import Range


def test_an_autopsy_is_plain_values_for_the_run_file():
    """JSON can write it."""
    autopsy = Autopsy(3, "forward", "a.b", "mul", "float16", "inf", (Range("float16", (2,), 0.0, 1.0),), notes=("x",))
    values = json.loads(json.dumps(autopsy.as_dict()))
    assert values["module"] == "a.b"
    assert values["inputs"][0]["shape"] == [2]


def test_the_text_has_every_part():
    """Sentence, inputs, advice, notes and defects, one on each line."""
    autopsy = Autopsy(
        3,
        "forward",
        inputs=(Range("float16", (2,), 0.0, 1.0),),
        sentence="It overflowed.",
        advice="Use bf16.",
        notes=("eager",),
        defects=("torch: wrong.",),
    )
    assert str(autopsy).splitlines() == [
        "Step 3 was skipped (forward): It overflowed.",
        "  input: 2 float16 in [0, 1]",
        "  Use bf16.",
        "  note: eager",
        "  known defect: torch: wrong.",
    ]
    assert autopsy.replayed
