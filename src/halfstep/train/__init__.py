"""The loop over a Job: data, steps, validation, checkpoints, run file."""

from halfstep.train.config import TrainConfig
from halfstep.train.loop import train
from halfstep.train.outcome import TrainOutcome

__all__ = ["TrainConfig", "TrainOutcome", "train"]
