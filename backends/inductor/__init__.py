"""Inductor: the lowering to compiled segments, each kind of segment compiled once."""
