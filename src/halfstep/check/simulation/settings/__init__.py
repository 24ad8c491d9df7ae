"""Runs of a script with the settings that it offers: their defaults, and one precision setting changed."""
