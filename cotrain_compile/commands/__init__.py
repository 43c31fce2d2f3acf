"""Commands: subcommands of `cotrain-compile` that look at saved plans and steps. No torch."""
