"""Find moves: Placement -> Moves. What has to cross the link, run on the host or run elsewhere.

In: a Problem and a Placement. Out: `Moves`, each with the slot after which it may start or before
which it must be done, and the stays of every buffer on the device at the least.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate

from cotrain_compile.dataflow import PERSISTENT_ROLES, Buffer, UpdateGroup
from cotrain_compile.dataflow.guesses import guesses_of
from cotrain_compile.machine import Tier
from cotrain_compile.placement.op_order import Instance
from cotrain_compile.placement.placed import PlacedStep, place
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import (
    gradients_at_home,
    low_precision_makers,
    without_ops,
    written_before,
)
from cotrain_compile.placement.schedule import books
from cotrain_compile.placement.schedule.gradient_uses import GradientUses, gradient_uses
from cotrain_compile.placement.schedule.hoisted_updates import (
    joined_by_layer,
    last_ops,
    layer_windows,
    movable,
    update_needs,
    written_early,
)
from cotrain_compile.placement.schedule.moves import (
    Cast,
    DeviceUpdate,
    Fetch,
    Moves,
    Send,
    SpeculativeUpdate,
    UpdateOnHost,
)
from cotrain_compile.placement.schedule.moves_of_pieces import in_pieces
from cotrain_compile.placement.schedule.stays import stays
from cotrain_compile.plan import Placement


def moves_of(problem: Problem, placement: Placement, *, by_layer: bool = False) -> Moves:
    """The moves of `placement`; `by_layer` as in `Tactics`."""
    return _Finder(place(problem, placement), by_layer=by_layer).moves()


class _Finder:
    """What is found so far; casts come before weights, and these before the updates."""

    def __init__(self, placed: PlacedStep, *, by_layer: bool) -> None:
        self.problem, self.placement, whole = placed.problem, placed.placement, placed.program
        problem, placement, self.dataflow = placed.problem, placed.placement, placed.dataflow
        self.moving = [g for g in self.dataflow.updates if movable(placement, g)]
        every = update_needs(self.dataflow) if self.moving else {}
        self.needs = {group.param: every[group.param] for group in self.moving}
        self.last_ops, self.written_early = last_ops(self.dataflow), written_early(self.dataflow)
        supporting = {name for needs in self.needs.values() for name in needs.support}
        self.program = without_ops(whole, supporting.union(*(g.ops for g in self.moving)))
        position = self.dataflow.position
        self.places = [position[op.name] for op in self.program.ops]  # in the order of the step
        seconds = problem.costs.device_s
        durations_s = map(seconds.__getitem__, self.program.slot)
        self.elapsed_s = list(accumulate(durations_s, initial=0.0))
        self.pieced = {each.param: each for each in problem.pieces}
        self.offloaded, self.refetched = set(placement.offloaded), set(placement.refetched)
        self.at_home = set(gradients_at_home(self.dataflow, placement))
        self.updated_from = {group.gradient: group for group in self.dataflow.updates}
        self.windows = {group.param: self._window(group) for group in self.dataflow.updates}
        self.guesses = guesses_of(self.dataflow) if placement.speculative else {}
        self.joins = joined_by_layer if by_layer else list[DeviceUpdate]
        if by_layer:
            self.windows |= layer_windows({g.param: self.windows[g.param] for g in self.moving})
        # What moved updates read must stay until they run, however early the others are done.
        self.read_by_moved = {group.gradient: group for group in self.moving}
        self.shared = {name for group in self.moving for name in group.scalars}
        ops = self.dataflow.ops
        moved_along = (ops[position[name]] for name in supporting - whole.left_out)
        self.shared |= {made for op in moved_along for made in op.writes}
        self.shared = self.shared.union(*(needs.made_before for needs in self.needs.values()))
        self.sends: list[Send] = []
        self.offloads: dict[str, Send] = {}  # those of `sends` that make a copy, by buffer
        self.stores: dict[str, Send] = {}  # those that go over a home
        self.fetches: list[Fetch] = []
        self.instances: list[Instance] = []
        self.casts: list[Cast] = []
        self.update_names = {
            group.param: books.task_name("update", group.param)
            for group in self.program.host_groups
        }
        # Names of what makes and fetches each weight at home on the host.
        self.weight_tasks: dict[str, tuple[str, ...]] = {}

    def moves(self) -> Moves:
        self._casts()
        fetched = {copy: param for param, copy in self.program.fetched.items()}
        homes = self.placement.homes.items()
        off_device = (name for name, tier in homes if tier is not Tier.DEVICE)
        others = self.at_home.union(
            fetched, off_device, self.shared, self.offloaded, self.read_by_moved
        )
        for buffer, stays_there in zip(self.dataflow.buffers, self.program.unmoved, strict=True):
            if buffer.name not in others:
                self.instances += stays_there
            elif buffer.name in self.at_home:
                self._gradient_at_home(buffer)
            elif buffer.name in fetched:
                self._weight(buffer, fetched[buffer.name])
            elif self.placement.homes.get(buffer.name, Tier.DEVICE) is Tier.DEVICE:
                self._buffer(buffer)
            elif buffer.param:
                self._new_gradient(buffer)
        device_updates = self.joins(
            [u for group in self.moving for u in self._device_updates(group)]
        )
        host_updates = [self._host_update(group) for group in self.program.host_groups]
        return Moves(
            self.program,
            self.elapsed_s,
            tuple(sorted(self.sends, key=lambda send: send.ready)),
            tuple(sorted(self.fetches, key=lambda fetch: fetch.need)),
            tuple(self.casts),
            tuple(sorted(host_updates, key=self._landed)),
            tuple(sorted(device_updates, key=lambda u: (u.earliest, bool(u.fetches)))),
            tuple(self.instances),
        )

    def _landed(self, update: UpdateOnHost) -> int:
        """Parameters whose gradients come first are updated first."""
        return self.program.last_write(update.group.gradient)

    # Buffers.

    def _casts(self) -> None:
        copied = [(p, copy) for p, copy in self.program.fetched.items() if copy != p]
        makers = low_precision_makers(self.dataflow) if copied else {}
        touches = self.program.touches
        for param, copy in sorted(copied, key=lambda pair: touches.get(pair[1], (0,))[0]):
            ops = makers[copy][-1:]
            seconds = self.problem.host_cast_s(ops)
            name = books.task_name("cast", param)
            cast = Cast(name, param, copy, ops, seconds, self._deferred_update(param))
            self.casts.append(cast)
            self.weight_tasks[param] = (cast.name,)

    def _weight(self, buffer: Buffer, param: str) -> None:
        """The fetches of a weight whose home is on the host."""
        touched = self.program.touches.get(buffer.name, [])
        after = self.weight_tasks.get(param, ())
        group = self.dataflow.update.get(param)
        # The gap to be offloaded in is before the update: after it the weight is on its way home.
        limit = self.windows[param][1] if group is not None else self.program.end
        old = [slot for slot in touched if slot < limit]
        gap = self.program.order.longest_gap(old) if self._is_off(buffer) else None
        found = stays(old, () if gap is None else (gap,))
        if found and len(old) < len(touched):
            found[-1] = (found[-1][0], touched[-1])
        for number, (first, last) in enumerate(found):
            name = books.task_name("refetch" if number else "fetch", buffer.name)
            # Where there is a cast, that follows the update of the step before.
            previous = () if after else self._deferred_update(param)
            self.fetches.append(Fetch(name, buffer.name, buffer.nbytes, first, after, previous))
            self.weight_tasks[param] = (*self.weight_tasks.get(param, ()), name)
            if param in self.needs and buffer.name == param and last == touched[-1]:
                last = max(last, self.windows[param][0])
            self.instances.append(Instance(buffer, first, last + 1))

    def _gradient_at_home(self, buffer: Buffer) -> None:
        """A kept gradient at home on the host: fetched for its uses, and sent back if written.

        It is offloaded in the longest gap before it is written and its update may run. Where that
        runs on the device, it reads what is fetched here, and then sends it back itself.
        """
        name, uses = buffer.name, self._uses_of(buffer.name)
        group = self.updated_from.get(name)
        updates_here = group if group is not None and group.param in self.needs else None
        # Where the update is the first to touch it, that has a fetch of its own.
        first_number = 1 if updates_here and not uses.before else 0
        for number, (first, last) in enumerate(uses.stays, start=first_number):
            fetch = books.task_name("refetch" if number else "fetch", name)
            self.fetches.append(Fetch(fetch, name, buffer.nbytes, first))
            if updates_here and uses.before and (first, last) == uses.stays[-1]:
                last = max(last, self.windows[updates_here.param][0])
            self.instances.append(Instance(buffer, first, last + 1))
        if uses.written and (uses.written_late or not updates_here):
            ready, last = uses.written[-1], uses.stays[-1][1]
            store = books.task_name("store", name)
            self.stores[name] = Send(store, name, buffer.nbytes, ready, last + 1, name)
            self.sends.append(self.stores[name])

    def _uses_of(self, name: str) -> GradientUses:
        group = self.updated_from.get(name)
        limit = self.windows[group.param][1] if group is not None else self.program.end
        return gradient_uses(self.program, name, limit)

    def _new_gradient(self, buffer: Buffer) -> None:
        """A gradient that the step makes and keeps on the host: sent there after its last use."""
        touched = self.program.touches[buffer.name]
        self._send(buffer, self.program.last_write(buffer.name), touched[-1] + 1)
        self.instances.append(Instance(buffer, touched[0], touched[-1] + 1))

    def _buffer(self, buffer: Buffer) -> None:
        """Any other buffer: on the device from its first use to its last, or in a few stays."""
        touched = self.program.touches.get(buffer.name, [])
        if buffer.name in self.shared and not buffer.is_input:
            self._until_the_end(buffer, touched[0] if touched else 0)
        elif buffer.is_input:
            self._until_the_end(buffer, 0)
        elif touched and (buffer.role in PERSISTENT_ROLES or buffer.is_output):
            self._until_the_end(buffer, touched[0])
        elif touched:
            self._temporary(buffer, touched)

    def _until_the_end(self, buffer: Buffer, first: int) -> None:
        self.instances.append(Instance(buffer, first, self.program.end + 1))

    def _temporary(self, buffer: Buffer, touched: list[int]) -> None:
        times = 2 if buffer.name in self.refetched else 1
        gaps = (
            self.program.order.offloaded_gaps(buffer.name)[:times] if self._is_off(buffer) else ()
        )
        for number, (first, last) in enumerate(stays(touched, gaps)):
            if buffer.name in self.read_by_moved and buffer.name not in self.offloaded:
                last = max(last, self.windows[self.read_by_moved[buffer.name].param][0])
            self.instances.append(Instance(buffer, first, last + 1))
            if number:
                before = gaps[0][0]
                # Its copy may be on its way while it is still read.
                written = written_before(self.program, buffer.name, before)
                send = self._send(buffer, written, before + 1)
                name = books.task_name("fetch" if number == 1 else "refetch", buffer.name)
                self.fetches.append(Fetch(name, buffer.name, buffer.nbytes, first, (send.name,)))

    def _is_off(self, buffer: Buffer) -> bool:
        return buffer.name in self.offloaded and buffer.name not in self.read_by_moved

    def _send(self, buffer: Buffer, ready: int, holds_from: int | None) -> Send:
        if buffer.name not in self.offloads:
            name = books.task_name("offload", buffer.name)
            self.offloads[buffer.name] = Send(name, buffer.name, buffer.nbytes, ready, holds_from)
            self.sends.append(self.offloads[buffer.name])
        return self.offloads[buffer.name]

    # Updates.

    def _host_update(self, group: UpdateGroup) -> UpdateOnHost:
        returns = self.placement.homes[group.param] is Tier.DEVICE
        # Of its scalars those that the device computes: fixed ones are on the host already.
        sources = [group.gradient, *(n for n in group.scalars if n not in self.dataflow.fixed)]
        sources = [group.param, *sources] if returns else sources
        next_use = self._next_use(group)
        earliest, limit = self.windows[group.param]
        inputs: dict[str, str] = {}  # the sends of the sources
        for name in sources:
            if name in self.at_home:  # the host reads it there, after what the device has written
                if self._uses_of(name).written_before:
                    inputs[name] = self.stores[name].name
                continue
            buffer = self.dataflow.buffer[name]
            touched = self.program.touches.get(name, [])
            holds_from = touched[-1] + 1 if buffer.is_passing else None
            writes = [t for t in touched if t < limit and name in self.program.ops[t].writes]
            ready = max(writes, default=-1)
            if name == group.param and next_use is not None:
                ready = max(ready, next_use)  # there is a wait for the weight before that op
            inputs[name] = self._send(buffer, ready, holds_from).name
        return UpdateOnHost(
            self.update_names[group.param],
            group,
            tuple(inputs.values()),
            self.weight_tasks.get(group.param, ()),
            self._allowed(earliest, limit),
            limit,
            returns,
            self.problem.costs.host_update_s[group.param],
            next_use,
            self._speculation(group, inputs),
        )

    def _allowed(self, earliest: int, limit: int) -> int:
        """The slot after which an update on the host may start that its inputs allow so early."""
        if self.placement.early_updates:
            return earliest
        backward = self.program.order.backward
        before = bisect_left(backward, limit)
        return max(earliest, backward[before - 1]) if before else earliest

    def _speculation(
        self, group: UpdateGroup, inputs: Mapping[str, str]
    ) -> SpeculativeUpdate | None:
        """The update of `group` on guesses, where it is worth while; `inputs` are its sends."""
        guesses = self.guesses.get(group.param, ())
        if group.param not in self.placement.speculative or not guesses:
            return None
        earliest, limit = self._window(group, guesses)
        if (earliest := self._allowed(earliest, limit)) >= self.windows[group.param][0]:
            return None
        return SpeculativeUpdate(
            books.task_name("speculate", group.param),
            guesses,
            tuple(send for name, send in inputs.items() if name not in guesses),
            self.weight_tasks.get(group.param, ()),
            self._deferred_update(group.param),
            earliest,
            self.problem.costs.host_update_s[group.param] + self.problem.saving_s(group.param),
        )

    def _next_use(self, group: UpdateGroup) -> int | None:
        """The slot of the next step up to which an update on the host may go on; None: no further.

        None too where this step uses or returns what the update writes, and where the update reads
        what lies in `.grad`: that is the user's when the step returns.
        """
        if not self.placement.overlap_steps:
            return None
        param, program = group.param, self.program
        touched = program.touches.get(program.fetched.get(param, param), [])
        written = [self.dataflow.buffer[name] for name in (param, *group.states)]
        in_step = self.windows[param][1] < program.end or any(b.is_output for b in written)
        in_step = in_step or self.placement.is_off_device(group.gradient)
        if in_step or not touched:
            return None
        return touched[0]

    def _deferred_update(self, param: str) -> tuple[str, ...]:
        """The update of `param` on the host, where it may go on in the next step."""
        group = self.dataflow.update.get(param)
        if group is None or param not in self.update_names or self._next_use(group) is None:
            return ()
        return (self.update_names[param],)

    def _device_updates(self, group: UpdateGroup) -> list[DeviceUpdate]:
        """The update of `group`, or one for each of its pieces."""
        whole, pieced = self._device_update(group), self.pieced.get(group.param)
        if pieced is None:
            return [whole]
        return in_pieces(self.dataflow, whole, pieced, self.problem.costs.device_s)

    def _device_update(self, group: UpdateGroup) -> DeviceUpdate:
        buffers, homes, param = self.dataflow.buffer, self.placement.homes, group.param
        earliest, limit = self.windows[param]
        states = [name for name in group.states if homes[name] is Tier.HOST]
        fetched, stores, weight_bytes = states, states, 0
        if homes[param] is Tier.HOST:
            stores = [param, *states]
            if self.program.fetched[param] == param and self.program.touches.get(param):
                weight_bytes = buffers[param].nbytes
            else:
                fetched = [*states, param]
        fetches = [_fetch(buffers[name], earliest) for name in fetched]
        gradient = buffers[group.gradient]
        fetched_gradient, gradient_bytes = self._gradient_for(group)
        fetches += fetched_gradient
        if gradient.name in self.at_home and self._uses_of(gradient.name).written_before:
            stores = [*stores, gradient.name]
        needs = self.needs[param]
        ops = (*needs.support, *group.ops)
        return DeviceUpdate(
            (group.param,),
            ops,
            earliest,
            limit,
            tuple(fetches),
            tuple(stores),
            gradient_bytes,
            weight_bytes,
            needs.workspace_bytes,
            sum(self.problem.costs.device_s[name] for name in ops),
        )

    def _gradient_for(self, group: UpdateGroup) -> tuple[list[Fetch], int]:
        """How an update on the device gets its gradient: fetched, or so many bytes held for it."""
        gradient = self.dataflow.buffer[group.gradient]
        name, earliest = gradient.name, self.windows[group.param][0]
        if name in self.at_home and not self._uses_of(name).before:
            return [_fetch(gradient, earliest)], 0
        if self._leaves(gradient):
            last = self.program.touches[name][-1]
            send = self._send(gradient, last, last + 1)
            return [_fetch(gradient, earliest, send.name)], 0
        held = gradient.is_passing or self.placement.is_off_device(name)
        return [], gradient.nbytes if held else 0

    def _window(self, group: UpdateGroup, guesses: tuple[str, ...] = ()) -> tuple[int, int]:
        """The slot after which the update may run, and the slot of the op that needs its result.

        Everything that uses the old parameter or states comes before it, and the making of all that
        it reads but for `guesses`.
        """
        program, places, write = self.program, self.places, self.last_ops[group.param]
        own = {group.param, *group.states, program.fetched.get(group.param, group.param)}
        needs = self.needs.get(group.param)
        others = needs.made_before if needs is not None else ()
        inputs = {group.gradient, *group.scalars, *others}.difference(guesses)
        if self.dataflow.buffer[group.gradient].is_input:  # the step may write it after the update
            own, inputs = own | {group.gradient}, inputs - {group.gradient}
        # Ops are in the order of the step: the slots before and behind that of the last of its own.
        until = bisect_left(places, write)
        since = bisect_right(places, write, lo=until)
        early = self.written_early.get(group.param, {}) if since == until else {}
        before, later = [-1], [program.end]
        for name in own & program.touches.keys():
            touched, first, behind = program.touches[name], until, since
            if name in early:  # the slot before which the update would have written it
                first = behind = bisect_left(places, early[name])
            if (count := bisect_left(touched, first)) > 0:
                before.append(touched[count - 1])
            later += touched[bisect_left(touched, behind) :][:1]
        made = [program.last_write(name) for name in inputs]
        if needs is not None and self._leaves(self.dataflow.buffer[group.gradient]):
            made.append(program.touches[group.gradient][-1])  # it comes back when it has left
        return max([*before, *made]), min(later)

    def _leaves(self, gradient: Buffer) -> bool:
        """Whether the device sends a gradient offloaded, and fetches it for an update there."""
        off_device = self.placement.is_off_device(gradient.name)
        rests = off_device or (gradient.is_passing and gradient.name in self.offloaded)
        return rests and not gradient.is_input


def _fetch(buffer: Buffer, need: int, *after: str) -> Fetch:
    name = books.task_name("fetch", buffer.name)
    return Fetch(name, buffer.name, buffer.nbytes, need, after)
