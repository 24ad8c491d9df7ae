"""What to train: the Job class, command-line targets, built-in jobs, data and models."""
