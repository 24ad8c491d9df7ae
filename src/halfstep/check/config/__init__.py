"""Facts from configurations: JSON, YAML and Python read into trees with places."""
