"""Recompute: forward values that are made again for the backward instead of being kept."""
