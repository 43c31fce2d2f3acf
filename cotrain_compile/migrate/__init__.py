"""Migrate: a training configuration of another framework, in terms of this one.

Rooms from the top down: `read` knows which framework a file is of, and writes the step to train
with; each framework has a module that says what its settings mean; `counterparts` are the data. No
torch.
"""
