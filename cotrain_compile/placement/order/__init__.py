"""Order: a step of several micro-batches, run layer by layer."""
