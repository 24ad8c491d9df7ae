"""Halfstep inside the libraries that people train with: one small file each, on their own extension points."""
