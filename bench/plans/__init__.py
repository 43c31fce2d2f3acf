"""How good are plans? Simulated, beside simple rules, bounds and published systems."""
