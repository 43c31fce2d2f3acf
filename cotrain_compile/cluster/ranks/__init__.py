"""Ranks: the step of one rank, made of a traced step, and planned tensor by tensor."""
