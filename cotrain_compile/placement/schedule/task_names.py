"""Names of tasks: one for each task of a plan, for people to read. What a task does is in its data.

A task refers to another by the name that this was given. So each name is made once, where its task
is found, and nobody makes it a second time to refer to it, or reads anything out of it.
"""

from __future__ import annotations


def task_name(verb: str, what: str) -> str:
    """The name of the task that does `verb` to the buffer or parameter `what`."""
    return f"{verb}.{what}"
