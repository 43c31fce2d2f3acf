"""Pipelining: a model in stages over ranks, each planned within its budget."""
