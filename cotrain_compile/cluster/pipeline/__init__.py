"""Pipeline: a chain of layers cut into stages, one on each device."""
