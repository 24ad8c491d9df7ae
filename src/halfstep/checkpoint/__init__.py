"""What a run writes to disk: checkpoint directories and their files, retention, export, RNG state, the run file."""
