"""Runs a training script on symbolic values, to see in which order a run calls its scaler and optimizers."""
