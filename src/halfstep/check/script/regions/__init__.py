"""Which parts of a script run inside autocast regions."""
