"""Numerics of a run while it trains: which layer overflows, underflows or stops learning."""
