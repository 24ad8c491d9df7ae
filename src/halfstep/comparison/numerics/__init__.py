"""What the formats do to the numbers of a run: underflow, the worst layer, and why steps were skipped."""
