"""Optimizers that hold an fp32 master beside 16-bit weights."""

from halfstep.optim.adamw import Adam, AdamW
from halfstep.optim.adopt import adopt
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.lion import Lion
from halfstep.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "LeanOptimizer", "Lion", "adopt"]
