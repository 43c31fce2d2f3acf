"""Held: small tasks that begin together, when somebody waits for one of them.

In: the small tasks of a step, in the order in which they were started. Out: which of them begin,
and on which thread. To wake up a thread for a small task takes longer than the task, and two
threads that take turns in Python hold up one another. So none begins before the step's thread
waits, and then a single thread does all that is to be done before it can go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cotrain_compile.analysis.races import IN_ORDER
from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.runtime.lanes import Task, WorkerLane


class Held:
    """What is held of a step, for its `lanes`; used by the step's thread alone."""

    def __init__(self, lanes: Mapping[LaneName, WorkerLane]) -> None:
        self._lanes = lanes
        self._tasks: list[Task] = []

    def add(self, task: Task) -> None:
        self._tasks.append(task)

    def hand_over(self) -> None:
        """Let all begin, each on its own lane."""
        tasks, self._tasks = self._tasks, []
        for name, lane in self._lanes.items():
            if own := [task for task in tasks if task.lane == name]:
                lane.hand_over(own)

    def hand_over_rest(self, started: Iterable[Task]) -> None:
        """Let all of `started`, in their order, begin that have not been handed over.

        An interrupt may come between any two lines of this class, and of who starts a task: what it
        kept from a thread is neither held any more nor ever done.
        """
        self._tasks = [task for task in started if not task.is_handed_over]
        self.hand_over()

    def hand_over_for(self, awaited: Collection[Task]) -> Task | None:
        """Let those of `awaited` begin that are held, and what comes before them.

        Where every lane is idle one thread does them one after the other, and the last is returned;
        else all that is held begins.
        """
        needed = self._needed_for(awaited)
        if not needed or not all(lane.is_idle for lane in self._lanes.values()):
            self.hand_over()
            return None
        begin = set(needed)
        self._tasks = [task for task in self._tasks if task not in begin]
        updates = any(task.lane == LaneName.HOST for task in needed)
        # The threads that run updates may be bound to cores.
        name = LaneName.HOST if updates else LaneName(needed[-1].lane)
        self._lanes[name].hand_over(needed)
        return needed[-1]

    def _needed_for(self, awaited: Collection[Task]) -> list[Task]:
        """What is held of `awaited`, with all that it comes after, on its link too; in order."""
        wanted, links, needed = set(awaited), set[str](), list[Task]()
        for task in reversed(self._tasks):
            if task in wanted or task.lane in links:
                needed.append(task)
                wanted.update(task.after)
                if task.lane in IN_ORDER:
                    links.add(task.lane)
        return needed[::-1]
