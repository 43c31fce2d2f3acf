"""Fold: a step with fewer ops, of which a plan is one of the step as it is written."""
