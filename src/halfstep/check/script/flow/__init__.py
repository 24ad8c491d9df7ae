"""What a script does, in order: guards, events, traces, and queries over them."""
