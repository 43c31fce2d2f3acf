"""Viz: text and pictures of any type. Reads everything, imported by what faces the user only."""
