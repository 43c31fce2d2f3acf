"""Text: what is said on the console about steps, plans and runs."""
