"""The same job in several precisions, side by side: isolated runs, statistics and a verdict."""

from halfstep.comparison.compare import compare
from halfstep.comparison.result import Comparison, read_comparison

__all__ = ["Comparison", "compare", "read_comparison"]
