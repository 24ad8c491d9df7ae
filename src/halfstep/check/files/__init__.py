"""Files: bytes to text and back, notebooks, and the findings about files that cannot be checked."""
