"""Optimizers that keep fp32 masters for 16-bit weights, and moments in fp32, bf16 or 8 bits."""

from halfstep.optim.adamw import Adam, AdamW
from halfstep.optim.adopt import adopt
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.lion import Lion
from halfstep.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "LeanOptimizer", "Lion", "adopt"]
