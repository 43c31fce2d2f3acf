"""Remat: which forward values are made again for the backward, by checkpoints or a minimum cut."""
