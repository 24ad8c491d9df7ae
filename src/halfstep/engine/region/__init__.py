"""Regions: where the forward pass computes in 16 bits, and what stays in fp32 inside them."""

from halfstep.engine.region.block import compute_region, recomputing
from halfstep.engine.region.casts import upcast
from halfstep.engine.region.copies import fp32_weights
from halfstep.engine.region.kernels import has_kernel, install, operations_of, overloads, reinstall

__all__ = [
    "compute_region",
    "fp32_weights",
    "has_kernel",
    "install",
    "operations_of",
    "overloads",
    "recomputing",
    "reinstall",
    "upcast",
]
