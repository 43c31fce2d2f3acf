"""Demo: a small training job that needs more memory than its budget allows, from start to end."""
