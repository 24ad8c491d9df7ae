"""What checkpoints contain and restore: which of several scalers, and which of several checkpoints have the scaler."""
