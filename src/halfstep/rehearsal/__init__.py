"""A rehearsal: a few fp32 steps, and what fp16, bf16, fp8 and block-scaled formats would do to their numbers."""

from halfstep.rehearsal.rehearse import rehearse
from halfstep.rehearsal.result import Rehearsal

__all__ = ["Rehearsal", "rehearse"]
