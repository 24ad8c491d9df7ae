"""Block-scaled formats, emulated."""
