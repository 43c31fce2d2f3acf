"""Viz: text and pictures of any type. Reads everything, imported by `cli` and `compile` only."""
