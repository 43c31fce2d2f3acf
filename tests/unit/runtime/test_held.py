"""Held tasks: which of them begin for one that is waited for, and on how many threads."""

import threading
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.runtime.held import Held
from cotrain_compile.runtime.lanes import Task, WorkerLane

PATIENCE_S = 20.0
DOWN, UP, HOST = LaneName.D2H, LaneName.H2D, LaneName.HOST


class Lanes:
    """Lanes of a device, what is held for them, and who has run what."""

    def __init__(self) -> None:
        self.lanes = {name: WorkerLane(name) for name in (DOWN, UP, HOST)}
        self.held = Held(self.lanes)
        self.ran: list[str] = []
        self.threads: set[str] = set()
        self.tasks: list[Task] = []

    def start(self, lane: LaneName, name: str, after: Sequence[Task] = ()) -> Task:
        def work() -> None:
            self.ran.append(name)
            self.threads.add(threading.current_thread().name)

        task = self.lanes[lane].submit(name, work, after, held=True)
        self.held.add(task)
        self.tasks.append(task)
        return task

    def update(self, of: str) -> Task:
        """The way of a parameter: its gradient comes down, it is updated, it goes back up."""
        gradient = self.start(DOWN, f"gradient of {of}")
        update = self.start(HOST, f"update of {of}", [gradient])
        return self.start(UP, f"weight of {of}", [update])


def test_all_that_is_needed_runs_in_order_on_one_thread() -> None:
    on = Lanes()
    on.update("a")
    last = on.update("b")
    assert on.held.hand_over_for([last]) is last
    assert last.done.wait(PATIENCE_S)
    assert on.ran == [f"{what} of {of}" for of in "ab" for what in ("gradient", "update", "weight")]
    assert on.threads == {"cotrain-host-0"}  # which may be bound to cores


def test_what_nobody_waits_for_goes_on_being_held() -> None:
    on = Lanes()
    first = on.update("a")
    (update,) = first.after
    gradient = on.start(DOWN, "gradient of b")
    assert on.held.hand_over_for([gradient]) is gradient
    assert gradient.done.wait(PATIENCE_S)
    assert on.ran == ["gradient of a", "gradient of b"]  # a link passes one after the other
    assert not update.done.is_set()
    on.held.hand_over()
    assert first.done.wait(PATIENCE_S)


def test_behind_a_task_at_work_each_waits_on_its_own_lane() -> None:
    on, gate = Lanes(), threading.Event()
    slow = on.lanes[DOWN].submit("slow", lambda: gate.wait(PATIENCE_S), [])
    alone = on.start(UP, "weight of a")
    behind = on.update("b")
    assert on.held.hand_over_for([alone, behind]) is None
    assert alone.done.wait(PATIENCE_S)
    assert on.ran == ["weight of a"]
    gate.set()
    assert behind.done.wait(PATIENCE_S)
    assert slow.ran
    assert on.threads == {f"cotrain-{lane}-0" for lane in (DOWN, UP, HOST)}


def test_what_an_interrupt_keeps_from_a_thread_is_handed_over_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = Lanes()
    last = on.update("a")
    monkeypatch.setattr(WorkerLane, "hand_over", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        on.held.hand_over_for([last])
    on.update("b")
    with pytest.raises(KeyboardInterrupt):
        on.held.hand_over()
    monkeypatch.undo()
    on.held.hand_over_rest(on.tasks)
    assert all(task.done.wait(PATIENCE_S) for task in on.tasks)
    assert sorted(on.ran) == sorted(task.name for task in on.tasks)


def test_a_task_that_is_handed_over_twice_is_done_once() -> None:
    on, go_on = Lanes(), threading.Event()
    first = on.lanes[DOWN].submit("first", go_on.wait, ())
    again = on.start(DOWN, "again", [first])
    for lane in on.lanes.values():
        lane.hand_over([again])
    behind = on.start(UP, "behind")  # on a lane that waits for the other's
    on.held.hand_over()
    go_on.set()
    assert behind.done.wait(PATIENCE_S)
    assert on.ran == ["again", "behind"]
