"""Write the DeepSpeed configuration of a policy, and merge a configuration of your own with one.

Run it without arguments. DeepSpeed need not be installed.
"""

import json

from halfstep import Policy
from halfstep.check.deepspeed import merge_deepspeed

# In the shape of a file for Hugging Face's Trainer, with comments as DeepSpeed allows them.
CONFIG = """
{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": "auto"},  // speed only
  "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
  "amp": {"enabled": false}
}
"""

if __name__ == "__main__":
    policy = Policy.parse("bf16-lean")
    print(json.dumps(policy.to_deepspeed(stage=2, max_norm=1.0, accumulate=4), indent=2))
    merged = merge_deepspeed(
        CONFIG, policy=policy, max_norm=1.0, accumulate=4, batch_size=8, optimizer="torch.optim.adamw.AdamW"
    )
    for decision in merged.decisions:
        print(f"- {decision}")
    for note in merged.notes:
        print(f"- {note}")
    for fault in merged.faults:
        print(f"- {fault}")
