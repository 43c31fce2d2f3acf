"""Sources: where clusters and layer profiles come from: presets, files, traced steps."""
