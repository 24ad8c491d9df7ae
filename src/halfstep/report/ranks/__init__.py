"""Several GPUs and the hours of a run, as tables and plain data."""
