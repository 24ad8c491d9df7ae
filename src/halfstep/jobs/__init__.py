"""What to train: the Job value, targets on the command line, built-in jobs, data and models."""
