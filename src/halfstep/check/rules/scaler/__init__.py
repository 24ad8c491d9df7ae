"""Rules over the life of a GradScaler: how it is created, what it is passed, what it unscales, and where it is missing."""
