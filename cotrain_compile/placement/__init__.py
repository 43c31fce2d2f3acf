"""Placement: from a step as numbers to where everything lives and when it moves. No torch.

Dataflow, Machine, budgets --`problem`--> Problem --`policies`--> Placement
  --`schedule`--> Plan, checked by `check`, timed by `predict`
"""
