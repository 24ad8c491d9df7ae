"""What the values of a script are: devices, dtypes, scalers, models, optimizers, engines."""
