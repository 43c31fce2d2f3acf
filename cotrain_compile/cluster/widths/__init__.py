"""Widths: on how many devices each layer of a model runs."""
