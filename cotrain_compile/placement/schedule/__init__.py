"""Schedule: from a placement to a plan. Decides when each copy and update is issued."""
