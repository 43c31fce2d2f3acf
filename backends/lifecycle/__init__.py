"""Lifecycle: a compiled step from its dry run over its runs to a failure."""
