"""Decisions: what can be decided about a step, and what each decision costs."""
