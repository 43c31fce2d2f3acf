"""Check: is a plan sound? Shares no code with the modules that make plans."""
