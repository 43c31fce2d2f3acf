"""Explain: why a plan is as it is, and what other budgets or machines would bring."""
