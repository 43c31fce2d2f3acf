"""Several ranks: one training step that runs in many processes, each on a card of its own."""
