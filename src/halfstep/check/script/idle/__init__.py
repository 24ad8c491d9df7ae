"""Settings without an effect: options, keys, limits and choices that nothing for the training reads."""
