"""Problem: what a placement has to decide about, as numbers: the step, the machine, the budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotrain_compile.analysis.costs import CostTable, fuses, roofline, with_measured
from cotrain_compile.analysis.held import held_bytes, holding
from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.dataflow.guesses import second_bytes
from cotrain_compile.dataflow.regions import part_name
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.casts import casts_once
from cotrain_compile.placement.order.by_layer import in_packs
from cotrain_compile.placement.pieces import Pieced, in_pieces, piece_seconds, pieces_under
from cotrain_compile.placement.recompute.rewrite import is_again, recomputed, recomputed_ops
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import Placement

# 2: its machine is one of any number of spaces, processors and links.
FORMAT_VERSION = 2


@dataclass(frozen=True)
class Written:
    """A step in its own order, with what its ops cost."""

    dataflow: Dataflow
    costs: CostTable


@dataclass(frozen=True)
class Rewrites:
    """What makes of a step that is written the one that runs, as in `Problem`: nothing by default.

    In the order in which it is done.
    """

    splits: Mapping[str, int] = field(default_factory=dict)
    cast_once: bool = False
    layers_per_pack: int = 0
    recomputed: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    pieces: tuple[Pieced, ...] = ()

    def is_same(self, other: Rewrites) -> bool:
        """Whether the step is the same, in whichever order values are named."""
        return self._as_sets == other._as_sets

    @property
    def _as_sets(self) -> object:
        again = frozenset(self.recomputed), frozenset(self.apart)
        return self.splits, self.cast_once, self.layers_per_pack, again, self.pieces


@dataclass(frozen=True)
class Problem:
    """A step to be placed: `budgets` are the bytes allowed on each tier.

    `captured` says that updates on the host run op by op even where there is a loop, `compiled` as
    what code ops run (`roofline`), `speculates` that updates may begin on guesses. `whole_bytes`
    are those of values inside of compiled kernels, which have in `dataflow` what they take of
    memory (`analysis.held`). In it regions run in parts by `splits`, micro-batches in packs of
    `layers_per_pack`, each parameter is `cast_once`, the values `recomputed` are made again, some
    `apart`, and some updates go in `pieces`, all nothing in the problem of a step; else the step
    itself is what is `written`. Of the parameters those `resting` are not decided about: they stay
    on the device.
    """

    dataflow: Dataflow
    machine: Machine
    costs: CostTable
    budgets: Mapping[Tier, int]
    captured: bool = False
    compiled: bool | None = None
    recomputed: tuple[str, ...] = ()
    speculates: bool = False
    layers_per_pack: int = 0
    splits: Mapping[str, int] = field(default_factory=dict)
    pieces: tuple[Pieced, ...] = ()
    written: Written | None = None
    apart: tuple[str, ...] = ()
    whole_bytes: Mapping[str, int] = field(default_factory=dict)
    cast_once: bool = False
    resting: frozenset[str] = frozenset()

    @property
    def step(self) -> Dataflow:
        """The step as it is written, with all bytes of all its values."""
        return holding(self.written.dataflow if self.written else self.dataflow, self.whole_bytes)

    @property
    def rewrites(self) -> Rewrites:
        """What makes of the step that is written the one that runs."""
        return Rewrites(
            self.splits,
            self.cast_once,
            self.layers_per_pack,
            self.recomputed,
            self.apart,
            self.pieces,
        )

    def under(self, placement: Placement) -> Problem:
        """The problem of the step that is left under `placement`: this one, where it is of that.

        Whatever this one makes again is not in it. Raises `PlanError` where the step has no such
        order.
        """
        written = self.written or Written(self.dataflow, self.costs)
        parts = split_regions(written.dataflow, placement.splits)
        return self._rewritten(
            Rewrites(
                placement.splits,
                placement.casts_once,
                placement.layers_per_pack,
                placement.recomputed,
                placement.recomputed_apart,
                pieces_under(casts_once(parts) if placement.casts_once else parts, placement),
            )
        )

    def in_packs(self, layers_per_pack: int) -> Problem:
        """The problem of the step whose micro-batches run in packs of so many layers.

        Raises `PlanError` where the step does not allow that.
        """
        return self._rewritten(replace(self._whole, layers_per_pack=layers_per_pack))

    def recomputing(self, names: Sequence[str], apart: Sequence[str] = ()) -> Problem:
        """The problem of the step in which `names` are made again, and nothing else.

        Some of them `apart`, on copies of their own.
        """
        again = tuple(names), tuple(apart)
        return self._rewritten(replace(self._whole, recomputed=again[0], apart=again[1]))

    def splitting(self, splits: Mapping[str, int]) -> Problem:
        """The problem of the step whose regions run in so many parts, and no others."""
        return self._rewritten(replace(self._whole, splits=splits))

    def casting_once(self) -> Problem:
        """The problem of the step in which the copy of each parameter is made once."""
        return self._rewritten(replace(self._whole, cast_once=True))

    @property
    def _whole(self) -> Rewrites:
        """This one's without pieces, which are of one placement."""
        return replace(self.rewrites, pieces=())

    def _rewritten(self, asked: Rewrites) -> Problem:
        """From what is written, in whatever order it is asked for.

        An op takes as long the second time as the first, a part what the machine's rates allow.
        """
        if asked.is_same(self.rewrites):
            return self
        written = self.written or Written(self.dataflow, self.costs)
        parts = split_regions(written.dataflow, asked.splits)
        costs = self._with_parts(written, parts, asked.splits)
        cast = casts_once(parts) if asked.cast_once else parts
        ordered = in_packs(cast, asked.layers_per_pack)
        copies = recomputed_ops(ordered, asked.recomputed, asked.apart)
        known, sent = costs.device_s, costs.network_s
        device_s = {**known, **{copy: known[op] for copy, op in copies.items()}}
        network_s = {**sent, **{copy: sent[op] for copy, op in copies.items() if op in sent}}
        device_s |= piece_seconds(asked.pieces, known, self.machine)
        again = recomputed(ordered, asked.recomputed, asked.apart)
        return replace(
            self,
            dataflow=in_pieces(again, asked.pieces),
            costs=replace(costs, device_s=device_s, network_s=network_s),
            written=None if asked.is_same(Rewrites()) else written,
            **vars(asked),
        )

    def _with_parts(
        self, written: Written, parts: Dataflow, splits: Mapping[str, int]
    ) -> CostTable:
        """The costs of the step that is written in parts."""
        if parts is written.dataflow:
            return written.costs
        costs = written.costs
        made = self._roofline(split_regions(self.step, splits))
        # What room is made for in parts is called as the op that made it whole.
        whole = {op.name: op.target for op in written.dataflow.ops}
        own = {op.name for op in parts.ops if whole.get(op.name) == op.target}
        known = costs.device_s
        device_s = {op: known[op] if op in own else s for op, s in made.device_s.items()}
        if costs.source != "roofline":
            device_s |= self._as_measured(written, made.device_s)
        unknown = tuple(name for name in made.unknown if name not in own or name in costs.unknown)
        return replace(costs, device_s=device_s, unknown=unknown)

    def _roofline(self, dataflow: Dataflow) -> CostTable:
        return roofline(dataflow, self.machine, captured=self.captured, compiled=self.compiled)

    def _as_measured(self, written: Written, made: Mapping[str, float]) -> dict[str, float]:
        """Seconds of parts, as much more than the machine's rates allow as of the whole op."""
        rates = self._roofline(self.step).device_s
        found: dict[str, float] = {}
        for region in written.dataflow.regions:
            for op in region.ops:
                known, part = written.costs.device_s[op.name], 0
                while (name := part_name(op.name, part)) in made:
                    scale = known / rates[op.name] if rates[op.name] else 1.0
                    found[name] = scale * made[name]
                    part += 1
        return found

    def as_its_own_step(self) -> Problem:
        """The same, of a step that is written as this one runs."""
        return replace(self, written=None, **vars(Rewrites()))

    def with_budget(self, tier: Tier, budget_bytes: int) -> Problem:
        """The same with another budget on one tier."""
        return replace(self, budgets={**self.budgets, tier: budget_bytes})

    @property
    def disk_bytes(self) -> int:
        """What states may take of the machine's drive; 0 without one, or where nobody allows it.

        Only fused loops take them piece by piece.
        """
        has_any = self.machine.disk is not None and not self.captured
        return self.budgets.get(Tier.DISK, 0) if has_any else 0

    @property
    def unknown_ops(self) -> tuple[Op, ...]:
        """The ops whose cost nobody knows: no plan's time, and no bound, has counted it in full."""
        dataflow = self.dataflow
        return tuple(dataflow.ops[dataflow.position[name]] for name in self.costs.unknown)

    def saving_s(self, param: str) -> float:
        """Seconds in which the host saves what an update overwrites, or puts it back."""
        saved = second_bytes(self.dataflow, self.dataflow.update[param])
        return 2 * saved / self.machine.host.bytes_per_s

    def host_cast_s(self, ops: Sequence[str]) -> float:
        """Seconds in which the host makes a low-precision copy with `ops`: it streams bytes."""
        dataflow, host = self.dataflow, self.machine.host
        moved = sum(dataflow.ops[dataflow.position[name]].bytes_moved for name in ops)
        return host.launch_s + moved / host.bytes_per_s


def formulate(
    dataflow: Dataflow,
    machine: Machine,
    budgets: Mapping[Tier, int],
    profile: CostTable | None = None,
    *,
    captured: bool = False,
    compiled: bool | None = None,
) -> Problem:
    """The problem of `dataflow` on `machine`; `captured` as in `Problem`, `compiled` in `roofline`.

    Without a budget for a drive the machine is taken without it. Costs come from its roofline, and
    from `profile` where it has a measured time; what a plan has made again in the measured step is
    in no other plan, and left out. Raises `PlanError` when the profile is of another step,
    `OptionError` where there is a budget for a drive and none.
    """
    if Tier.DISK in budgets and machine.disk is None:
        raise OptionError(
            f"the machine {machine.name} has no drive; take a preset that has one, or a file of "
            "`cotrain-compile calibrate --disk FOLDER`"
        )
    if Tier.DISK not in budgets:
        machine = machine.with_disk(None)
    costs = roofline(dataflow, machine, captured=captured, compiled=compiled)
    held = held_bytes(dataflow) if fuses(machine, compiled) else {}
    if profile is not None:
        again = {name for name in profile.device_s if is_again(name, dataflow.position)}
        # What a wait was seen to take is what the network says.
        again |= {op.name for op in dataflow.ops if op.awaits and op.awaits in costs.network_s}
        device_s = {n: s for n, s in profile.device_s.items() if n not in again}
        costs = with_measured(costs, device_s=device_s, host_update_s=profile.host_update_s)
    whole = {name: dataflow.buffer[name].nbytes for name in held}
    step = holding(dataflow, held)
    return Problem(step, machine, costs, dict(budgets), captured, compiled, whole_bytes=whole)
