"""Devices: a step whose ops are spread over several devices is split, planned and simulated."""
