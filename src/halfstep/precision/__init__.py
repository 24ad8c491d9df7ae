"""Which formats a run uses: formats, policies, their names, loss-scale settings, and the choice for a device. No torch at import."""
