"""Regions of a graph: which ops may run in parts, and what of each value a part has."""
