"""Optimizers that keep fp32 masters for 16-bit weights, and moments in fp32, bf16 or 8 bits."""

from halfstep.optim.adadelta import Adadelta
from halfstep.optim.adagrad import Adagrad
from halfstep.optim.adamax import Adamax
from halfstep.optim.adamw import Adam, AdamW
from halfstep.optim.adopt import adopt
from halfstep.optim.asgd import ASGD
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.lion import Lion
from halfstep.optim.nadam import NAdam
from halfstep.optim.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam, from_deepspeed
from halfstep.optim.radam import RAdam
from halfstep.optim.rmsprop import RMSprop
from halfstep.optim.rprop import Rprop
from halfstep.optim.sgd import SGD

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "LeanOptimizer",
    "Lion",
    "NAdam",
    "OneBitAdam",
    "OneBitLamb",
    "RAdam",
    "RMSprop",
    "Rprop",
    "ZeroOneAdam",
    "adopt",
    "from_deepspeed",
]
