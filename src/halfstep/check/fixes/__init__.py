"""Fixes of scripts: where a line can be inserted, with which names, and for which optimizer."""
