"""Communication-compressed optimizers: 1-bit Adam, 0/1 Adam and 1-bit LAMB on torch.distributed."""

from halfstep.optim.onebit.adam import OneBitAdam
from halfstep.optim.onebit.base import OneBitOptimizer
from halfstep.optim.onebit.deepspeed import from_deepspeed
from halfstep.optim.onebit.lamb import OneBitLamb
from halfstep.optim.onebit.zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "OneBitOptimizer", "ZeroOneAdam", "from_deepspeed"]
