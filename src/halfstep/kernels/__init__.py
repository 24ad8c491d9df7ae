"""The arithmetic of a step: a readable torch reference first, Triton beside it."""
