"""DeepSpeed: ZeRO stages 0 to 3 under the Engine, and a description of engines that others built."""

from halfstep.backends.deepspeed.attach import EngineReport, GradientComparison, compare_gradients, describe_engine
from halfstep.backends.deepspeed.backend import DeepSpeed, ZeroStage0, deepspeed_backend

__all__ = [
    "DeepSpeed",
    "EngineReport",
    "GradientComparison",
    "ZeroStage0",
    "compare_gradients",
    "deepspeed_backend",
    "describe_engine",
]
