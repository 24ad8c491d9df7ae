"""The plots of a comparison: bars and curves, as one script-drawn figure each."""
