"""Cluster: which machines should train a model, cut how? Planned from figures alone. No torch."""
