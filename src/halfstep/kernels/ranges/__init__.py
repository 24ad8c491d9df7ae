"""The smallest and the largest element of many tensors: the torch reference, and one launch for all."""
