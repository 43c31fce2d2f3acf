"""Split: the step with some of its regions in parts, as data."""
