"""Lifecycle: a compiled step from its rehearsal over its runs to a failure."""
