"""A rehearsal: a few fp32 steps, and what fp16, bf16, fp8 and block formats would do to their numbers."""
