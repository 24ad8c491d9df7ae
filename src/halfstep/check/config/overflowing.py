"""Checkpoints whose activations exceed the range of float16: they were pre-trained in bfloat16."""

from __future__ import annotations

import re

from halfstep.check.regex import regex

__all__ = ["OVERFLOWING"]

# t5-small and t5-base are reported to train in float16, so they are not among these. MedGemma, TranslateGemma,
# FunctionGemma, ShieldGemma 2 and T5Gemma 2 are Gemma 3 models; T0, MADLAD-400 and the LM-adapted checkpoints are T5 v1.1.
OVERFLOWING = regex(
    r"(?:^|[/_-])(?:flan[-_]?(?:t5|ul2|alpaca)|u?mt5|t5-?v1[._]1|t5-(?:large|3b|11b|xl|xxl)|t5-\w+-lm-adapt|long-?t5|mt0|t0(?:_3b|p{1,2})?|madlad-?400|"
    r"gemma-?3n?|(?:embedding|med|translate|function)gemma|shieldgemma-2|t5gemma-2)(?=$|[._-]|\d+m)",
    re.IGNORECASE,
)
