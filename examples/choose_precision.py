"""Choose a precision for this machine and for a few named GPUs, with the reasons.

Run it with `python examples/choose_precision.py`; no GPU is needed.
"""

import halfstep
from halfstep.hardware.probe import find_gpu

machine = halfstep.probe()
choice = halfstep.choose(machine)

print(f"This machine: {machine}")
print(f"Use precision={str(choice.policy)!r}:")
for reason in choice.reasons:
    print(f"  - {reason}")
for rejection in choice.rejected:
    print(f"  - {rejection}")

print("\nOther machines:")
for name in ("V100", "T4", "RTX 4090", "H100", "MI300X", "Apple M2"):
    gpu = find_gpu(name)
    print(f"  {name:10} {halfstep.choose(gpu).policy!s:6} (bf16: {gpu.support['bf16']})")
