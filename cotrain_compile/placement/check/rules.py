"""Rules: does a placement fit its step, and do the tasks of a plan fit the placement?

In: a Dataflow and a Placement or Plan. Out: nothing, or `PlanError` with the name that is wrong.
What is asked here can be seen without running anything; when things happen is for `replay`.

| mode          | home of the parameter | homes of the states | tasks                           |
|---------------|-----------------------|---------------------|---------------------------------|
| resident      | device                | device              | none                            |
| streamed      | either                | either              | states fetched and written back |
| host          | device                | host                | host region, the parameter back |
| host streamed | host                  | host                | host region                     |

A parameter at home on the host is fetched for its uses, or the low-precision copy of it that the
host makes; once, or twice where `offloaded` names it. Any other buffer in `offloaded` is sent and
fetched, those that are `refetched` once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import assert_never

from cotrain_compile.dataflow import PERSISTENT_ROLES, Buffer, Dataflow, Role, UpdateGroup
from cotrain_compile.dataflow.guesses import guesses_of
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.plan import HostRegion, Placement, Plan, Task, Transfer, UpdateMode
from cotrain_compile.plan.on_disk import (
    gradients_may_rest,
    may_rest_on_disk,
    value_may_rest,
    weight_may_rest,
)

# Where the parameter and the states must be at home; a streamed update leaves the choice.
_HOMES = {
    UpdateMode.RESIDENT: (Tier.DEVICE, Tier.DEVICE),
    UpdateMode.HOST: (Tier.DEVICE, Tier.HOST),
    UpdateMode.HOST_STREAMED: (Tier.HOST, Tier.HOST),
}
_UPDATED_ON_HOST = (UpdateMode.HOST, UpdateMode.HOST_STREAMED)


def check_placement(dataflow: Dataflow, placement: Placement) -> None:
    """Raise `PlanError` unless homes, update modes and `offloaded` are complete and fit."""
    persistent = {b.name for b in dataflow.buffers if b.role in PERSISTENT_ROLES}
    require(set(placement.homes) == persistent, "every persistent buffer needs one home")
    groups = set(dataflow.update)
    require(set(placement.updates) == groups, "every parameter needs one update mode")
    movable = {b.name for b in dataflow.buffers if b.role is Role.PARAM}
    for group in dataflow.updates:
        movable.update(group.states)
        _check_homes(dataflow, placement, group)
    for param, gradients in dataflow.kept_gradients.items():
        movable.update(gradients)
        for name in gradients:
            require(
                placement.is_off_device(name) is placement.is_off_device(param),
                f"{name}, which lies in the .grad of {param}, is not at home where that is",
            )
    allowed = _on_disk_at_most(dataflow, placement)
    for name, home in placement.homes.items():
        require(
            home is not Tier.DISK or name in allowed,
            f"{name} is at home on disk, where only states and parameters that the host updates "
            "may be, frozen ones, and gradients kept in .grad beside them",
        )
        require(
            home is Tier.DEVICE or name in movable,
            f"{name} is at home on the host, but it is neither a parameter, nor a state of one "
            "that has an update group, nor a gradient kept in .grad",
        )
    _check_offloaded(dataflow, placement)


def _on_disk_at_most(dataflow: Dataflow, placement: Placement) -> set[str]:
    """All that may rest on disk under `placement`."""
    params = {b.name for b in dataflow.buffers if b.role is Role.PARAM}
    weights = {name for name in params if weight_may_rest(dataflow, name)}
    allowed = weights.difference(dataflow.update)
    for group in dataflow.updates:
        mode = placement.updates[group.param]
        if mode in _UPDATED_ON_HOST and group.param not in placement.speculative:
            allowed.update(may_rest_on_disk(dataflow, group))
            if mode is UpdateMode.HOST_STREAMED:
                allowed.update(weights.intersection([group.param]))
    kept = {g for param in allowed & weights for g in gradients_may_rest(dataflow, param)}
    return allowed | kept


def _check_homes(dataflow: Dataflow, placement: Placement, group: UpdateGroup) -> None:
    homes, mode = placement.homes, placement.updates[group.param]
    if mode is UpdateMode.STREAMED:
        on_host = [n for n in (group.param, *group.states) if homes[n] is Tier.HOST]
        require(bool(on_host), f"{group.param} is streamed, but nothing of it is on the host")
        return
    of_param, of_states = _HOMES[mode]
    needed = {group.param: of_param, **dict.fromkeys(group.states, of_states)}
    needed |= {name: Tier.DISK for name in needed if homes[name] is Tier.DISK}  # which is allowed
    for name, tier in needed.items():
        require(
            homes[name] is tier,
            f"{name} is not at home on the {tier}, as the update mode {mode} of {group.param} asks",
        )


def _check_offloaded(dataflow: Dataflow, placement: Placement) -> None:
    require(
        len(set(placement.offloaded)) == len(placement.offloaded),
        "placement.offloaded names a buffer twice",
    )
    for name in placement.offloaded:
        require(
            name in dataflow.buffer, f"placement.offloaded names {name}, which the step has not"
        )
        buffer = dataflow.buffer[name]
        is_weight = buffer.role is Role.PARAM and placement.is_off_device(name)
        is_temporary = not (buffer.is_input or buffer.is_output or name in placement.homes)
        require(
            is_weight or is_temporary,
            f"placement.offloaded names {name}, which is neither a temporary nor a parameter at "
            "home on the host",
        )
    wrong = set(placement.refetched).difference(placement.offloaded) or {
        name for name in placement.refetched if name in placement.homes
    }
    require(not wrong, f"placement.refetched names {sorted(wrong)[:3]}, which are not offloaded")
    wrong = {
        name
        for name in placement.offloaded_to_disk
        if name not in placement.offloaded or not value_may_rest(dataflow, name)
    }
    require(
        not wrong,
        f"placement.offloaded_to_disk names {sorted(wrong)[:3]}, which are not offloaded, or no "
        "large values",
    )


def check_tasks(dataflow: Dataflow, plan: Plan) -> None:
    """Raise `PlanError` unless the tasks are those that the placement asks for, each once.

    A task that is missing altogether shows in the replay, where something needs its result.
    """
    names = [task.name for task in plan.tasks]
    require(len(set(names)) == len(names), "two tasks share a name")
    _check_updates(dataflow, plan)
    _check_deferred(plan)
    _check_bundles(dataflow, plan)
    casts = [region for region in plan.host_regions if region.makes]
    writers = _writers(dataflow, {region.makes for region in casts})
    for region in casts:
        _check_cast(dataflow, plan.placement, region, writers[region.makes])
    made = [region.makes for region in plan.host_regions if region.makes]
    _require_single(made, "is made on the host twice")
    states = {s: group.param for group in dataflow.updates for s in group.states}
    wholes = dataflow.pieces.wholes
    for transfer in plan.transfers:
        _check_bytes(dataflow, transfer)
        buffer = dataflow.buffer[transfer.buffer]
        _check_direction(plan.placement, set(made), states, wholes, buffer, transfer)
    found = {buffer.name for buffer in dataflow.buffers if buffer.param and buffer.is_input}
    _check_counts(plan, set(made), found, set(wholes.values()))


def _check_updates(dataflow: Dataflow, plan: Plan) -> None:
    """Every update that the placement has on the host has one region, with its ops."""
    hosted = {p for p, mode in plan.placement.updates.items() if mode in _UPDATED_ON_HOST}
    params = [region.param for region in plan.host_updates]
    _require_single(params, "is updated on the host twice")
    differing = sorted(hosted.symmetric_difference(params))
    require(not differing, f"host regions and host updates do not match: {differing[:3]}")
    for region in (*plan.host_updates, *plan.speculations):
        expected = dataflow.update[region.param].ops
        require(region.ops == expected, f"{region.name} does not run the update of {region.param}")
    _check_speculations(dataflow, plan)


def _check_speculations(dataflow: Dataflow, plan: Plan) -> None:
    """What is done on guesses is of a speculative parameter, and its update confirms it."""
    allowed = set(plan.placement.speculative)
    guessed = {region.name: region for region in plan.speculations}
    confirmed = {r.confirms: r for r in plan.host_regions if r.confirms}
    known = guesses_of(dataflow) if guessed else {}
    _require_single([r.confirms for r in plan.host_regions if r.confirms], "is confirmed twice")
    differing = sorted(confirmed.keys() ^ guessed.keys())
    require(not differing, f"guesses and what confirms them do not match: {differing[:3]}")
    for name, region in guessed.items():
        update = confirmed[name]
        require(
            region.param in allowed and region.param == update.param and not update.guesses,
            f"{name} is no speculative update of a parameter that {update.name} can confirm",
        )
        unknown = sorted(set(region.guesses).difference(known.get(region.param, ())))
        require(not unknown, f"{name} guesses {unknown[:3]}, which no step has neutral as a rule")
        require(
            name in update.after and not (region.makes or region.deferred),
            f"{update.name} does not come after {name}, which it confirms",
        )


def _check_deferred(plan: Plan) -> None:
    """Only updates on the host and the ways back of their weights go on in the next step."""
    deferred = {task.name for task in plan.deferred}
    for task in plan.deferred:
        require(
            plan.placement.overlap_steps and _may_be_deferred(task),
            f"{task.name} goes on in the next step, where the placement has only updates on the "
            "host and the ways back of their weights do so, and only with overlap_steps",
        )
        require(
            task.wait_before is not None,
            f"{task.name} goes on in the next step, but no op there waits for it",
        )
    for task in plan.tasks:
        unknown = sorted(set(task.after_previous) - deferred)
        require(not unknown, f"{task.name} comes after {unknown[:3]}, which no step carries over")


def _check_bundles(dataflow: Dataflow, plan: Plan) -> None:
    """A bundle can be carried out as one task: see `Transfer`."""
    ended: set[str] = set()
    before: Task | None = None
    members: set[str] = set()
    for task in plan.tasks:
        if before is None or task.bundle != before.bundle or not task.bundle:
            ended.add(before.bundle if before is not None else "")
            members = set()
            require(
                not task.bundle or (task.bundle == task.name and task.bundle not in ended),
                f"{task.name} is in bundle {task.bundle}, but not beside its other members",
            )
        else:
            require(
                _together(task) == _together(before),
                f"{task.name} and {before.name} are one bundle, but not of one kind, or not issued "
                "and waited for together",
            )
            require(
                members.isdisjoint(task.after),
                f"{task.name} comes after a task that it is in one bundle with",
            )
        require(
            not task.bundle or _may_be_in_a_bundle(dataflow, task),
            f"{task.name} is in a bundle, where only whole copies, and updates on the host that "
            "no step guesses or carries over, may be",
        )
        members.add(task.name)
        before = task


def _together(task: Task) -> tuple[object, ...]:
    """What the members of a bundle have in common."""
    how = (task.direction, bool(task.destination)) if isinstance(task, Transfer) else ()
    return task.kind, task.issue_after, task.wait_before, *how


def _may_be_in_a_bundle(dataflow: Dataflow, task: Task) -> bool:
    if task.deferred or task.after_previous:
        return False
    match task:
        case Transfer():
            is_piece = task.buffer in dataflow.pieces.wholes
            return not (is_piece or dataflow.buffer[task.buffer].param)
        case HostRegion():
            return not (task.makes or task.guesses or task.confirms)
        case _:
            assert_never(task)


def _may_be_deferred(task: Task) -> bool:
    """Whether it is an update on the host, or the way back of its weight."""
    match task:
        case HostRegion():
            return not task.makes
        case Transfer():
            return task.direction == "prefetch" and bool(task.destination)
        case _:
            assert_never(task)


def _writers(dataflow: Dataflow, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """The ops that write each of `names`, in program order."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
    for op in dataflow.ops:
        for name in found.keys() & op.writes:
            found[name] = (*found[name], op.name)
    return found


def _check_cast(
    dataflow: Dataflow, placement: Placement, region: HostRegion, writers: tuple[str, ...]
) -> None:
    group = dataflow.update.get(region.param)
    require(
        group is not None and group.low_precision == region.makes,
        f"{region.name} makes {region.makes}, which is not the low-precision copy of "
        f"{region.param}",
    )
    require(
        placement.is_off_device(region.param),
        f"{region.name} reads {region.param} on the host, but it is not at home there",
    )
    require(region.ops == writers, f"{region.name} does not run the cast that makes {region.makes}")


def _check_bytes(dataflow: Dataflow, task: Transfer) -> None:
    require(
        task.buffer in dataflow.buffer,
        f"{task.name} moves {task.buffer}, which the step has not",
    )
    require(
        task.destination in ("", task.buffer),
        f"{task.name} moves {task.buffer} over {task.destination}, another buffer",
    )
    size = dataflow.buffer[task.buffer].nbytes
    require(task.nbytes == size, f"{task.name} moves {task.nbytes} bytes of {size}")


def _check_direction(
    placement: Placement,
    made: set[str],
    states: dict[str, str],
    wholes: Mapping[str, str],
    buffer: Buffer,
    task: Transfer,
) -> None:
    """The placement has a reason for this kind of transfer of this buffer."""
    name = wholes.get(buffer.name, buffer.name)
    param = states.get(name, name)
    mode = placement.updates.get(param)
    on_host = placement.is_off_device(name)
    is_streamed = on_host and mode is UpdateMode.STREAMED
    is_kept = on_host and bool(buffer.param)
    match task.direction:
        case "offload":
            if task.destination:
                allowed = is_streamed or (is_kept and buffer.is_input)
                wrong = f"writes {name} back, but it is not streamed"
            else:
                allowed = name not in made and (not on_host or (is_kept and not buffer.is_input))
                wrong = f"copies {name}, which is on the host"
        case "prefetch":
            if task.destination:
                allowed = mode is UpdateMode.HOST and name == param
                wrong = f"overwrites {name}, which the host does not update"
            else:
                is_weight = (on_host and name not in states) or name in made
                allowed = is_weight or is_streamed or name in placement.offloaded
                wrong = f"fetches {name}, which the placement does not have on the host"
        case _:
            assert_never(task.direction)
    require(allowed, f"{task.name} {wrong}")


def _check_counts(plan: Plan, made: set[str], found: set[str], in_pieces: set[str]) -> None:
    """Nothing moves twice the same way, but what is fetched for the forward and the backward.

    And what the step `found` in `.grad`, which may be read some time before it is written. What is
    fetched `in_pieces` is missed where its update has not all of them.
    """
    fetched = Counter(t.buffer for t in plan.transfers if t.is_fetch)
    all_offloaded, refetched = set(plan.placement.offloaded), set(plan.placement.refetched)
    for name in {*fetched, *all_offloaded} - in_pieces:
        offloaded, again = name in all_offloaded, name in refetched
        twice = offloaded and (name in made or name in plan.placement.homes)
        most = 2 if twice or again or name in found else 1
        require(
            fetched[name] <= most and (fetched[name] >= most - again or not offloaded),
            f"{name} is fetched {fetched[name]} times, the placement asks for {most}"
            + (" since it is in placement.offloaded" if offloaded else ""),
        )
    for direction, fresh, message in (
        ("offload", True, "is copied to the host twice"),
        ("offload", False, "is written back twice"),
        ("prefetch", False, "is moved back twice"),
    ):
        same = (t for t in plan.transfers if t.direction == direction)
        _require_single((t.buffer for t in same if fresh is not bool(t.destination)), message)


def _require_single(names: Iterable[str], message: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    require(not twice, f"{', '.join(twice[:3])} {message}")


def require(condition: bool, message: str) -> None:
    """Raise `PlanError` with `message` unless `condition` holds."""
    if not condition:
        raise unsound(message)


def unsound(message: str) -> PlanError:
    """What is raised where a plan contradicts its step; made only then, where much is looked at."""
    return PlanError(f"unsound plan: {message}")
