"""Integrations: frameworks that own the training step, and how they hand it over whole."""
