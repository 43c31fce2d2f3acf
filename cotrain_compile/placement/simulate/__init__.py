"""Simulate: what a plan takes, by discrete events, for one step or for one among many."""
