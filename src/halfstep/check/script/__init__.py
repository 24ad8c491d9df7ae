"""Facts about Python scripts: names, values, events in order, traces."""
