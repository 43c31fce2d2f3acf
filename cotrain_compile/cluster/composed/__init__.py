"""Composed: pipelines, replicas, shards, divided layers and experts at once, on one mesh."""
