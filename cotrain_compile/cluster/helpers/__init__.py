"""Helpers: machines without devices that sum the gradients of the others."""
