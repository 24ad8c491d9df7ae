"""What happens to a loss between its scaling and the step of a scaler, and what the step of a schedule depends on."""
