"""Search: the portfolio of policies, and what is said where none fits."""
