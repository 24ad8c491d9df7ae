"""Memory before the run: predict a step's peak, find where it fits, check the prediction on a GPU."""

from halfstep.planning.answers import Entry, Plan, plan
from halfstep.planning.estimator import Estimate, predict_peak
from halfstep.planning.finder import FoundBatch, find_batch_size
from halfstep.planning.measured import MeasuredStep, measure_step
from halfstep.planning.ranks.counts import Answer

__all__ = [
    "Answer",
    "Entry",
    "Estimate",
    "FoundBatch",
    "MeasuredStep",
    "Plan",
    "find_batch_size",
    "measure_step",
    "plan",
    "predict_peak",
]
