"""Verify: the first steps, compared to the bit with the same step without its plan."""
