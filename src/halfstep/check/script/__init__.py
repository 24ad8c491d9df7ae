"""Facts from Python scripts: names, values, events in order, traces."""
