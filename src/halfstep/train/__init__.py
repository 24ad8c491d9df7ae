"""The loop over a Job: data, steps, validation, checkpoints, run file."""

from halfstep.train.config import TrainConfig
from halfstep.train.loop import TrainOutcome, train

__all__ = ["TrainConfig", "TrainOutcome", "train"]
