"""Offline: traces that are only looked at: without memory, for a card that is not there."""
