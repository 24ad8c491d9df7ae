"""Replay of a skipped step: what is recorded for it, and how it runs without a trace in the training."""
