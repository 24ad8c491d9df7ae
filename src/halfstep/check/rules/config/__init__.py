"""Rules over configurations."""
