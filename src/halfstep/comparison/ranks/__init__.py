"""Rows that several ranks train: their processes, what the ranks exchange, and what is not compared on ranks."""
