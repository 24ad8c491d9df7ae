"""Loss scalers with their state on the device, and the path of a step's outcome back to the host."""
