"""Process: signals, cores, and loading a checkpoint into the tensors that are there."""
