"""Rules over weights, averages, losses and constants in 16 bits."""
