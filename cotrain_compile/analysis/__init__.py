"""Analyses: pure functions of a Dataflow, and of times where they need any. No torch."""
