"""The experiments, one file per subject: functions without arguments that return an `Outcome`."""
