"""Scaling: a model on the mesh of a plan's row, ready to train."""
