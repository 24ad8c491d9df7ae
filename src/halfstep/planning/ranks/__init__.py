"""Several GPUs: the bytes of one rank's shards, and the bytes that ranks exchange."""
