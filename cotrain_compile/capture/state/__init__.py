"""State: made before the first trace, and undone if that fails."""
