"""What an Engine saves and loads: `methods` on top, `state` for the whole, and a file for each part of the matching."""
