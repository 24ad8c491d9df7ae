"""The arithmetic of a step: a readable torch reference first, Triton next to it under the same stem."""
