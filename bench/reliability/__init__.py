"""What breaks it? Faults, signals, random programs and long runs."""
