"""Rendering: the only code that turns values into text, tables and files."""
