"""Which precision should this machine train in, and what would other machines get?

Run it with `python examples/choose_precision.py`; it needs no GPU.
"""

import halfstep
from halfstep.hardware.probe import find_gpu

machine = halfstep.probe()
choice = halfstep.choose(machine)

print(f"This machine: {machine}")
print(f"Train it with precision={str(choice.policy)!r}, because:")
for reason in choice.reasons:
    print(f"  - {reason}")
for rejection in choice.rejected:
    print(f"  - {rejection}")

print("\nElsewhere:")
for name in ("V100", "T4", "RTX 4090", "H100", "MI300X", "Apple M2"):
    gpu = find_gpu(name)
    print(f"  {name:10} {halfstep.choose(gpu).policy!s:6} (bf16 is {gpu.support['bf16']} there)")
