"""Signs of fp32 numbers as bits, 8 to a byte."""
