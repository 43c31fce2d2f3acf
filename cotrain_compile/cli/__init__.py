"""The command line, `cotrain-compile`: one module for each group of subcommands."""
