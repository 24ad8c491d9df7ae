"""Runs of the same job in several precisions, side by side, and a verdict over them."""

from halfstep.comparison.compare import compare
from halfstep.comparison.result import Comparison, read_comparison

__all__ = ["Comparison", "compare", "read_comparison"]
