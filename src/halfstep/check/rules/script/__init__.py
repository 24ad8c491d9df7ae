"""Rules over scripts."""
