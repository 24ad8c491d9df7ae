"""Mixed-precision training in the right order, around a loop that the user owns."""
