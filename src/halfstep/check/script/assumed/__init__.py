"""A script for one value of a precision setting: which settings a file reads, and what is left of it for each value."""
