"""Dynamo: how this backend's steps are traced, and what is said of what cannot be."""
