"""What a script trains: parts of a model that are trained again, and flags of the training that are off by default."""
