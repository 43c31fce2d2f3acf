"""Migrate: a training configuration of another framework, in terms of this one.

Rooms from the top down: `read` knows which framework a file is of; each framework has a module that
says what its settings mean; `step_text` writes the step to train with; `counterparts` and
`training` are the data. No torch.
"""
