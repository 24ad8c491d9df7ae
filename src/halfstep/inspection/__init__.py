"""What any training loop stores and computes in, as values that tests can assert; `halfstep.inspect` is the way in."""
