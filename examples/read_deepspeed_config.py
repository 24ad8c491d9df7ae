"""Convert a DeepSpeed configuration to a Halfstep policy, with a note for every key that is not carried over as it is.

Run it without arguments: it writes a small configuration to a temporary directory and reads it.
"""

import tempfile
from pathlib import Path

from halfstep.precision.policy import read_deepspeed

CONFIG = """
{
  "fp16": {
    "enabled": true,
    "initial_scale_power": 32,   // a common value; the run starts with skipped steps
    "hysteresis": 2,
  },
  "zero_optimization": {"stage": 2},
  "gradient_accumulation_steps": 8,
  "gradient_clipping": 1.0,
  "steps_per_print": 100
}
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ds_config.json"
        path.write_text(CONFIG)
        reading = read_deepspeed(path)
    print(f"precision   {reading.policy}")
    print(f"max_norm    {reading.max_norm}")
    print(f"accumulate  {reading.accumulate}")
    for note in reading.notes:
        print(f"- {note}")
