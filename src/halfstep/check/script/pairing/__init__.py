"""Which scaler belongs to which region: the flags, devices and formats that switch them on, and where only one of them is."""
