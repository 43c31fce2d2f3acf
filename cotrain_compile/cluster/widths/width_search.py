"""Width search: on how many devices each layer runs, so that the step takes least.

In: a `WidthProblem`, in which the samples of a step are a fixed number. Out: a `WidthPlan`
(DeepPool; Park et al., MLSys 2022), by a dynamic program over the widths of all layers:

    t[i, g] = min over p of t[i-1, p] + transfer(p, g) + compute(i, batch/g) + sync(i, g)

Branches between two layers are searched for every pair of widths that those may have. They run one
after the other on the same devices, or beside one another on devices of their own. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cotrain_compile.cluster.model.profiles import BATCH
from cotrain_compile.cluster.widths.branches import Item
from cotrain_compile.cluster.widths.width_problem import WidthProblem, is_pinned


@dataclass(frozen=True)
class WidthPlan:
    """The width of each layer by name, which layers run on devices beside, and the step's time."""

    widths: Mapping[str, int]
    beside: tuple[str, ...]
    step_s: float


def plan_widths(problem: WidthProblem) -> WidthPlan:
    """The widths with the least step time; among equals few device-seconds."""
    ends = _WidthSearch(problem).along(problem.items, {0: _Path(0.0, 0.0)}, problem.devices, False)
    best = min(ends.values(), key=_cost)
    widths, beside = {}, []
    for choice, is_beside in best.choices():
        widths[choice.layer] = choice.width
        if is_beside:
            beside.append(choice.layer)
    order = problem.profile.index
    return WidthPlan(
        {name: widths[name] for name in order},
        tuple(sorted(beside, key=order.__getitem__)),
        best.seconds,
    )


class _Choice(NamedTuple):
    """A layer and its width."""

    layer: str
    width: int


class _Nested(NamedTuple):
    """A way through branches, on devices beside or on those of the others."""

    path: _Path
    is_beside: bool


class _Chosen(NamedTuple):
    """What was chosen, and what before that."""

    choice: _Choice | _Nested
    before: _Chosen | None


class _Path(NamedTuple):
    """A way to run some layers: seconds, device-seconds, and what was chosen, last first."""

    seconds: float
    device_s: float
    chosen: _Chosen | None = None

    def then(self, seconds: float, width: int, choice: _Choice | None = None) -> _Path:
        chosen = self.chosen if choice is None else _Chosen(choice, self.chosen)
        return _Path(self.seconds + seconds, self.device_s + seconds * width, chosen)

    def choices(self, beside: bool = False) -> Iterator[tuple[_Choice, bool]]:
        """Every layer with its width, and whether it runs on devices beside."""
        chosen = self.chosen
        while chosen is not None:
            if isinstance(chosen.choice, _Nested):
                yield from chosen.choice.path.choices(beside or chosen.choice.is_beside)
            else:
                yield chosen.choice, beside
            chosen = chosen.before


def _cost(path: _Path) -> tuple[float, float]:
    """What is to be least: seconds, and among equals device-seconds."""
    return path.seconds, path.device_s


class _WidthSearch:
    """The dynamic program for one problem; what lies between two layers is searched once."""

    def __init__(self, problem: WidthProblem) -> None:
        self.problem = problem
        self._known: dict[tuple[int, int, int, int], _Path | None] = {}

    def along(
        self, items: tuple[Item, ...], starts: Mapping[int, _Path], devices: int, beside: bool
    ) -> dict[int, _Path]:
        """The best paths through `items` by the width of the last, from those before them.

        Where they run `beside`, the first one shares no device with what it reads.
        """
        for i, item in enumerate(items):
            ends = {}
            for width in self._widths(devices):
                paths = [
                    path
                    for before, start in starts.items()
                    if not is_pinned(item) or (before == width and not (beside and i == 0))
                    if (path := self._to(item, before, width, devices, start, beside and i == 0))
                ]
                if paths:
                    ends[width] = min(paths, key=_cost).then(
                        self.problem.layer_s(item.layer, width),
                        width,
                        _Choice(item.layer.name, width),
                    )
            starts = ends
        return dict(starts)

    def _widths(self, devices: int) -> list[int]:
        return [width for width in self.problem.widths if width <= devices]

    def _to(
        self, item: Item, before: int, width: int, devices: int, start: _Path, beside: bool
    ) -> _Path | None:
        """`start`, at width `before`, then all that leads to `item` at `width`."""
        if item.branches == ((),):
            return self._transfer(start, item, item.layer.reads[0].source, before, width, beside)
        key = (id(item), before, width, devices)
        if key not in self._known:
            self._known[key] = self._between(item, before, width, devices)
        between = self._known[key]
        if between is None:
            return None
        chosen = _Chosen(_Nested(between, False), start.chosen)
        return _Path(start.seconds + between.seconds, start.device_s + between.device_s, chosen)

    def _transfer(
        self, start: _Path, item: Item, source: str, before: int, width: int, beside: bool
    ) -> _Path:
        if source == BATCH:  # each device reads its own samples
            return start
        nbytes = next(r.nbytes for r in item.layer.reads if r.source == source)
        seconds = self.problem.transfer_s(
            nbytes.at(self.problem.batch), before, width, beside=beside
        )
        return start.then(seconds, max(before, width))

    def _between(self, item: Item, before: int, width: int, devices: int) -> _Path | None:
        """All branches that lead to `item`, along and beside one another, at those two widths."""
        caps = self._widths(devices)
        found = []
        for cap in caps:
            options: list[_Option] = [_Option(0, _Path(0.0, 0.0), 0.0, 0.0)]
            for branch in item.branches:
                options = _undominated(
                    new
                    for old in options
                    for new in self._with(old, branch, item, before, width, cap, devices)
                )
            found += [option.together() for option in options]
        return min(found, key=_cost, default=None)

    def _with(
        self,
        old: _Option,
        branch: tuple[Item, ...],
        item: Item,
        before: int,
        width: int,
        cap: int,
        devices: int,
    ) -> Iterator[_Option]:
        """`old` with one more branch: along with the others, or beside on some devices more."""
        along = self._branch(branch, item, before, width, cap, beside=False)
        if along is not None:
            yield old.and_along(along)
        if not branch:
            return
        for own in self.problem.widths:
            if cap + old.used + own > devices:
                return
            path = self._branch(branch, item, before, width, own, beside=True)
            if path is not None:
                yield old.and_beside(path, own)

    def _branch(
        self,
        branch: tuple[Item, ...],
        item: Item,
        before: int,
        width: int,
        devices: int,
        *,
        beside: bool,
    ) -> _Path | None:
        """The best way through a branch and to `item`, at those two widths."""
        start = _Path(0.0, 0.0)
        if not branch:
            source = self._source(item)
            return self._transfer(start, item, source, before, width, False)
        ends = self.along(branch, {before: start}, devices, beside)
        source = branch[-1].layer.name
        return min(
            (
                self._transfer(path, item, source, last, width, beside)
                for last, path in ends.items()
            ),
            key=_cost,
            default=None,
        )

    def _source(self, item: Item) -> str:
        """Of what an item reads, what is on none of its branches: where they all begin."""
        on_branches = {branch[-1].layer.name for branch in item.branches if branch}
        return next(r.source for r in item.layer.reads if r.source not in on_branches)


class _Option(NamedTuple):
    """Some branches: devices used beside, those along one another, and the longest beside."""

    used: int
    main: _Path
    longest_s: float
    beside_device_s: float

    def and_along(self, path: _Path) -> _Option:
        chosen = _Chosen(_Nested(path, False), self.main.chosen)
        main = _Path(self.main.seconds + path.seconds, self.main.device_s + path.device_s, chosen)
        return self._replace(main=main)

    def and_beside(self, path: _Path, devices: int) -> _Option:
        main = self.main._replace(chosen=_Chosen(_Nested(path, True), self.main.chosen))
        return _Option(
            self.used + devices,
            main,
            max(self.longest_s, path.seconds),
            self.beside_device_s + path.device_s,
        )

    def together(self) -> _Path:
        seconds = max(self.main.seconds, self.longest_s)
        return _Path(seconds, self.main.device_s + self.beside_device_s, self.main.chosen)


def _undominated(options: Iterator[_Option]) -> list[_Option]:
    """Those that no other one beats in devices, seconds along and seconds beside."""
    kept: list[_Option] = []
    for option in sorted(
        options, key=lambda o: (o.used, o.main.seconds, o.longest_s, o.main.device_s)
    ):
        if not any(
            k.main.seconds <= option.main.seconds and k.longest_s <= option.longest_s for k in kept
        ):
            kept.append(option)
    return kept
