"""Width search: the least step time over the widths of all layers, as a dynamic program.

In: a `WidthProblem`. Out: the best `Path` for each width of the last layer:

    t[i, g] = min over p of t[i-1, p] + transfer(p, g) + compute(i, batch/g) + sync(i, g)

Branches between two layers are searched for every pair of widths that those may have. They run one
after the other on the same devices, or beside one another on devices of their own. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cotrain_compile.cluster.branches import Item
from cotrain_compile.cluster.profiles import BATCH
from cotrain_compile.cluster.width_problem import WidthProblem, is_pinned


class Choice(NamedTuple):
    """A layer and its width."""

    layer: str
    width: int


class Nested(NamedTuple):
    """A way through branches, on devices beside or on those of the others."""

    path: Path
    is_beside: bool


class Chosen(NamedTuple):
    """What was chosen, and what before that."""

    choice: Choice | Nested
    before: Chosen | None


class Path(NamedTuple):
    """A way to run some layers: seconds, device-seconds, and what was chosen, last first."""

    seconds: float
    device_s: float
    chosen: Chosen | None = None

    def then(self, seconds: float, width: int, choice: Choice | None = None) -> Path:
        chosen = self.chosen if choice is None else Chosen(choice, self.chosen)
        return Path(self.seconds + seconds, self.device_s + seconds * width, chosen)

    def choices(self, beside: bool = False) -> Iterator[tuple[Choice, bool]]:
        """Every layer with its width, and whether it runs on devices beside."""
        chosen = self.chosen
        while chosen is not None:
            if isinstance(chosen.choice, Nested):
                yield from chosen.choice.path.choices(beside or chosen.choice.is_beside)
            else:
                yield chosen.choice, beside
            chosen = chosen.before


def cost(path: Path) -> tuple[float, float]:
    """What is to be least: seconds, and among equals device-seconds."""
    return path.seconds, path.device_s


class Search:
    """The dynamic program for one problem; what lies between two layers is searched once."""

    def __init__(self, problem: WidthProblem) -> None:
        self.problem = problem
        self._known: dict[tuple[int, int, int, int], Path | None] = {}

    def along(
        self, items: tuple[Item, ...], starts: Mapping[int, Path], devices: int, beside: bool
    ) -> dict[int, Path]:
        """The best paths through `items` by the width of the last, from those before them.

        Where they run `beside`, the first one shares no device with what it reads.
        """
        for i, item in enumerate(items):
            ends = {}
            for width in self._widths(item, devices):
                paths = [
                    path
                    for before, start in starts.items()
                    if not is_pinned(item) or (before == width and not (beside and i == 0))
                    if (path := self._to(item, before, width, devices, start, beside and i == 0))
                ]
                if paths:
                    ends[width] = min(paths, key=cost).then(
                        self.problem.layer_s(item.layer, width),
                        width,
                        Choice(item.layer.name, width),
                    )
            starts = ends
        return dict(starts)

    def _widths(self, item: Item, devices: int) -> list[int]:
        free = is_pinned(item)
        return [
            w
            for w in self.problem.widths
            if w <= devices and (free or self.problem.allows(item.layer, w))
        ]

    def _to(
        self, item: Item, before: int, width: int, devices: int, start: Path, beside: bool
    ) -> Path | None:
        """`start`, at width `before`, then all that leads to `item` at `width`."""
        if item.branches == ((),):
            return self._transfer(start, item, item.layer.reads[0].source, before, width, beside)
        key = (id(item), before, width, devices)
        if key not in self._known:
            self._known[key] = self._between(item, before, width, devices)
        between = self._known[key]
        if between is None:
            return None
        chosen = Chosen(Nested(between, False), start.chosen)
        return Path(start.seconds + between.seconds, start.device_s + between.device_s, chosen)

    def _transfer(
        self, start: Path, item: Item, source: str, before: int, width: int, beside: bool
    ) -> Path:
        if source == BATCH:  # each device reads its own samples
            return start
        nbytes = next(r.nbytes for r in item.layer.reads if r.source == source)
        seconds = self.problem.transfer_s(
            nbytes.at(self.problem.batch), before, width, beside=beside
        )
        return start.then(seconds, max(before, width))

    def _between(self, item: Item, before: int, width: int, devices: int) -> Path | None:
        """All branches that lead to `item`, along and beside one another, at those two widths."""
        caps = [w for w in self.problem.widths if w <= devices]
        found = []
        for cap in caps:
            options: list[Option] = [Option(0, Path(0.0, 0.0), 0.0, 0.0)]
            for branch in item.branches:
                options = _undominated(
                    new
                    for old in options
                    for new in self._with(old, branch, item, before, width, cap, devices)
                )
            found += [option.together() for option in options]
        return min(found, key=cost, default=None)

    def _with(
        self,
        old: Option,
        branch: tuple[Item, ...],
        item: Item,
        before: int,
        width: int,
        cap: int,
        devices: int,
    ) -> Iterator[Option]:
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
    ) -> Path | None:
        """The best way through a branch and to `item`, at those two widths."""
        start = Path(0.0, 0.0)
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
            key=cost,
            default=None,
        )

    def _source(self, item: Item) -> str:
        """Of what an item reads, what is on none of its branches: where they all begin."""
        on_branches = {branch[-1].layer.name for branch in item.branches if branch}
        return next(r.source for r in item.layer.reads if r.source not in on_branches)


class Option(NamedTuple):
    """Some branches: devices used beside, those along one another, and the longest beside."""

    used: int
    main: Path
    longest_s: float
    beside_device_s: float

    def and_along(self, path: Path) -> Option:
        chosen = Chosen(Nested(path, False), self.main.chosen)
        main = Path(self.main.seconds + path.seconds, self.main.device_s + path.device_s, chosen)
        return self._replace(main=main)

    def and_beside(self, path: Path, devices: int) -> Option:
        main = self.main._replace(chosen=Chosen(Nested(path, True), self.main.chosen))
        return Option(
            self.used + devices,
            main,
            max(self.longest_s, path.seconds),
            self.beside_device_s + path.device_s,
        )

    def together(self) -> Path:
        seconds = max(self.main.seconds, self.longest_s)
        return Path(seconds, self.main.device_s + self.beside_device_s, self.main.chosen)


def _undominated(options: Iterator[Option]) -> list[Option]:
    """Those that no other one beats in devices, seconds along and seconds beside."""
    kept: list[Option] = []
    for option in sorted(
        options, key=lambda o: (o.used, o.main.seconds, o.longest_s, o.main.device_s)
    ):
        if not any(
            k.main.seconds <= option.main.seconds and k.longest_s <= option.longest_s for k in kept
        ):
            kept.append(option)
    return kept
