"""Tasks and moved ops of a plan as lines for people.

    offload.h = offload(h, after=r, before=d)
    update.w = host(w, [mul, add], after=d)
    moved = move([mul, add], after=d)
    m = home(host)
    h = recompute()
    loss = parts(4)
    updates = pieces(1024)
    weights = cast_once()

In: such lines, and a `Placement` if there is one. Out: a `Plan`, of whose budgets and prediction
nothing is known. `lines` writes the tasks and moved ops of any plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cotrain_compile.machine import Tier
from cotrain_compile.plan import (
    HostRegion,
    MovedOps,
    Placement,
    Plan,
    Task,
    Timeline,
    Transfer,
    UpdateMode,
)
from tests.support.calls import Call, read_line


def parse(text: str) -> Plan:
    """The plan of `text`; a ValueError names the line that is wrong."""
    tasks: list[Task] = []
    moved: list[MovedOps] = []
    homes: dict[str, Tier] = {}
    updates: dict[str, UpdateMode] = {}
    recomputed: list[str] = []
    layers_per_pack = piece_bytes = 0
    splits: dict[str, int] = {}
    casts_once = False
    for line in filter(None, map(str.strip, text.splitlines())):
        name, call = read_line(line)
        match call.name:
            case "offload" | "prefetch" | "host":
                tasks.append(_task(name, call))
            case "move":
                moved.append(MovedOps(*map(_plain, (call.args[0], call.kwargs.get("after")))))
            case "home":
                homes[name] = Tier(call.args[0])
            case "update":
                updates[name] = UpdateMode(call.args[0])
            case "recompute":
                recomputed.append(name)
            case "parts":
                splits[name] = call.args[0]
            case "pieces":
                piece_bytes = call.args[0]
            case "packs":
                layers_per_pack = call.args[0]
            case "cast_once":
                casts_once = True
            case _:
                raise ValueError(f"{line!r} says nothing about a plan")
    placement = Placement(
        "by hand",
        homes,
        updates,
        recomputed=tuple(recomputed),
        layers_per_pack=layers_per_pack,
        splits=splits,
        piece_bytes=piece_bytes,
        casts_once=casts_once,
    )
    nothing = Timeline("predicted", (), {})
    return Plan("", "", {}, placement, tuple(tasks), nothing, moved=tuple(moved))


def _task(name: str, call: Call) -> Task:
    said: dict[str, Any] = {key: _plain(value) for key, value in call.kwargs.items()}
    timing: dict[str, Any] = {
        "issue_after": said.pop("after", None),
        "wait_before": said.pop("before", None),
        "after": said.pop("behind", ()),
        "after_previous": said.pop("behind_previous", ()),
    }
    if call.name == "host":
        param, ops = map(_plain, call.args)
        return HostRegion(name, param, ops, **timing, **said)
    into = said.pop("into", "")
    direction: Any = call.name
    buffer = _plain(call.args[0])
    return Transfer(name, direction, buffer, 0, **timing, destination=into, **said)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return str(value) if isinstance(value, str) else value


def lines(tasks: Iterable[Task], moved: Iterable[MovedOps] = ()) -> Iterator[str]:
    """One line for each of `moved`, then one a task, in order of issue."""
    for entry in moved:
        yield f"moved = move({_listed(entry.ops)}, after={entry.after})"
    for task in tasks:
        match task:
            case Transfer():
                what = [task.buffer, f"into={task.destination}" if task.destination else ""]
                kind: str = task.direction
            case HostRegion():
                guessed = f"guesses={_listed(task.guesses)}" if task.guesses else ""
                confirmed = f"confirms={task.confirms}" if task.confirms else ""
                made = f"makes={task.makes}" if task.makes else ""
                what, kind = [task.param, _listed(task.ops), made, guessed, confirmed], "host"
        yield f"{task.name} = {kind}({', '.join(filter(None, [*what, *_timing(task)]))})"


def _timing(task: Task) -> Iterator[str]:
    if task.issue_after is not None:
        yield f"after={task.issue_after}"
    if task.wait_before is not None:
        yield f"before={task.wait_before}"
    if task.after:
        yield f"behind={_listed(task.after)}"
    if task.deferred:
        yield "deferred=True"
    if task.after_previous:
        yield f"behind_previous={_listed(task.after_previous)}"
    if task.bundle:
        yield f"bundle={task.bundle}"


def _listed(names: Iterable[str]) -> str:
    return f"[{', '.join(names)}]"
