"""Entry: from the user's call to a compiled step, in order; what is asked of steps afterwards."""
