"""`halfstep watch`: a run's losses, loss scale and numbers, read from its run file, as text and as a page."""
