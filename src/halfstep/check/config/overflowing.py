"""Checkpoints whose activations exceed the range of float16: they were pre-trained in bfloat16."""

from __future__ import annotations

import re

from halfstep.check.regex import regex

__all__ = ["OVERFLOWING"]

# t5-small and t5-base are reported to train in float16, so they are not among these.
OVERFLOWING = regex(
    r"(?:^|[/_-])(?:flan-?t5|u?mt5|t5-?v1[._]1|t5-(?:large|3b|11b)|long-?t5|mt0|flan-ul2|gemma-?3n?|embeddinggemma)(?=$|[._-]|\d+m)",
    re.IGNORECASE,
)
