"""The hardware and what it runs natively: devices, probe, measurements, switches. No torch at import."""
