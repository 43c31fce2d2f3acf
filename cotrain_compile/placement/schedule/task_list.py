"""Task list: the tasks of a plan in order of issue, each placed among the ops that run.

In: tasks as they are issued, and the ops as they run. Out: the tasks with `issue_after` and
`wait_before` filled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotrain_compile.plan import Task


class TaskList:
    """What has been issued so far. A task that nobody waits for keeps the wait it came with."""

    def __init__(self) -> None:
        self._issued: list[tuple[Task, str | None]] = []  # with the op that it is issued after
        self._waits: dict[str, str] = {}  # the op before which a task is waited for, by its name
        self._waited_for: list[str] = []
        self._last_op: str | None = None

    @property
    def tasks(self) -> list[Task]:
        """In order of issue."""
        return [
            replace(
                task, issue_after=after, wait_before=self._waits.get(task.name, task.wait_before)
            )
            for task, after in self._issued
        ]

    def issue(self, task: Task) -> None:
        """Issue `task` after the op that ran last."""
        self._issued.append((task, self._last_op))

    def wait_for(self, name: str) -> None:
        """The task called `name` is waited for before the next op, or else at the end."""
        self._waited_for.append(name)

    def run(self, ops: Sequence[str]) -> None:
        """`ops` run now: what is waited for is waited for before the first of them."""
        for name in self._waited_for:
            self._waits[name] = ops[0]
        self._waited_for.clear()
        self._last_op = ops[-1]
