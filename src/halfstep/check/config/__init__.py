"""Facts about configurations: JSON, YAML and Python parsed into trees with positions."""
