"""Backends: lowerings of a placed step graph, and the compiled step that runs one."""
