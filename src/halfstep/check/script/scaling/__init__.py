"""When a scaler is on: what its flag, its conditions and the device leave out of the losses in float16."""
