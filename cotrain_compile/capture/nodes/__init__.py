"""Nodes: what is known of a node of the captured graph: its phase, its storage, its value."""
