"""What a script writes: names, functions, assignments, and edits of its text."""
