"""What a run leaves on disk: checkpoint directories, their parts, retention, export, the run file."""
