"""Optimizers that hold an fp32 master beside 16-bit weights."""

from halfstep.optim.adamw import Adam, AdamW
from halfstep.optim.lean import LeanOptimizer, adopt
from halfstep.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "LeanOptimizer", "adopt"]
