"""Support: what every room may use and what knows none of them: units, sizes, phases, caches."""
