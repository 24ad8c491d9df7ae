"""Rules over the life of a GradScaler: how it is created, what it is passed, and where it is missing."""
