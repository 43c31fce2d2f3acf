"""Swapped: models that rest on the host, whose layers come to devices in packs."""
