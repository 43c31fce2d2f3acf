"""Random sequences of what programs do between steps, on all ranks or on one of them alone.

`sequence_of` makes one from a seed; `played` runs it on a rank and says what is wrong, and what the
calls came to. After each act every rank calls the step once. Either all ranks train as one process
does on the batches of all, or all end with an error and nothing is updated; then what one rank has
done alone is undone, and they must train on.
"""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile
from cotrain_compile.distribute.meet import LEFT_APART
from cotrain_compile.errors import CotrainError

SHARED = {
    "ddp": DistributedDataParallel,
    "fully_shard": fully_shard,
    "shard": cotrain_compile.shard,
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
SETTINGS = ("lr", "weight_decay")
CONSTANTS = ("clip", "scale", "dropout")
OTHERS = ("call", "freeze", "save", "load", "edit", "edit a state", "rows", "bad index", "skip")
ACTS = (*SETTINGS, *CONSTANTS, *OTHERS)
# What these do on one rank alone, ranks have to be told of; in a sharded model the last ones are of
# a rank's own part.
APART = (*SETTINGS, "clip", "freeze", "rows", "bad index")
APART_IN_REPLICAS = ("load", "edit", "edit a state")
# What may differ before the exchange: they train, or are told that one of them compiles anew.
MAY_BE_TOLD = ("scale", "dropout")
ROUNDING = 1e-5  # of parameters below 1; compiled updates take bias corrections in float32
OPTIONS: dict[str, Any] = {"quiet": True, "policy": "zero-offload", "check_replicas": 1}

_ADVICE = "call torch._dynamo.reset() on every rank"


@dataclass(frozen=True)
class Act:
    """What is done, on one rank or, with None, on all."""

    what: str
    on: int | None = None


@dataclass(frozen=True)
class RankSequence:
    """How a model is shared and updated, and what is done in turn."""

    shared: str
    optimizer: str
    acts: tuple[Act, ...]


@dataclass
class Played:
    """What is wrong ("" where nothing is), and how often calls ended in which way.

    `is_over` says that the ranks were told to start again: their group is left in between.
    """

    wrong: str = ""
    is_over: bool = False
    ends: Counter[str] = field(default_factory=Counter)


def sequence_of(seed: int, ranks: int) -> RankSequence:
    """A random sequence, the first acts of which are calls."""
    rng = random.Random(seed)
    acts = [
        Act(rng.choice(ACTS), rng.choice((None, rng.randrange(ranks))))
        for _ in range(rng.randint(3, 5))
    ]
    shared = tuple(SHARED)[seed % len(SHARED)]
    return RankSequence(shared, rng.choice(tuple(OPTIMIZERS)), (Act("call"), *acts))


def played(rank: int, sequence: RankSequence) -> Played:
    """Play `sequence` on this rank."""
    torch._dynamo.reset()
    player = _Player(rank, sequence)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "cotrain: ", UserWarning)
        for act in sequence.acts:
            wrong = player.play(act)
            if wrong:
                player.found.wrong = f"{act}: {wrong}"
            if wrong or player.found.is_over:
                break
    return player.found


@functools.cache
def _own_group() -> dist.ProcessGroup:
    """What the ranks compare their ends over: no exchange of a step can be left in it."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=_own_group())
    return found


class _Player:
    """A model of the ranks, and a twin of the whole that is trained by this process alone."""

    def __init__(self, rank: int, sequence: RankSequence) -> None:
        self.rank, self.count = rank, dist.get_world_size()
        self.found = Played()
        torch.manual_seed(0)
        self.twin = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.GELU(), nn.Linear(8, 4))
        self.net = copy.deepcopy(self.twin)
        self.model: Any = SHARED[sequence.shared](self.net)  # type: ignore[operator]
        # `shard` leaves whole what the ranks cannot have equal parts of.
        self.is_replica = all(map(_is_whole, self.model.parameters()))
        made = OPTIMIZERS[sequence.optimizer]
        self.optimizer = made(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.twin_optimizer = made(self.twin.parameters(), lr=0.01, weight_decay=0.1)
        self.knobs = SimpleNamespace(clip=1.0, scale=1.0)
        self.twin_clip, self.scales = 1.0, [1.0] * self.count
        self.batches = [0] * self.count  # how many each rank has used
        self.told = False  # the ranks that may differ, in the last call
        self.run: Any = torch.compile(self._step, backend="cotrain", options=OPTIONS)
        self._save()

    def play(self, act: Act) -> str:
        """Do it and call the step; what is wrong then."""
        what, alone = act.what, act.on is not None
        here = act.on in (None, self.rank)
        undo = self._do(act, here) if what in ACTS else None
        apart = alone and (
            what in APART or (self.is_replica and what in APART_IN_REPLICAS and bool(undo))
        )
        if what == "bad index" or apart:
            # A state shows in the parameters of the next step, where it is seen.
            late = what == "edit a state" or (what == "load" and self.is_replica)
            wrong = self._must_fail(act, here, late=late)
            self._undo(undo)
            return wrong or self._must_train("undone", rows=6)
        may_be_told = alone and what in MAY_BE_TOLD
        wrong = self._must_train(what, 5 if what == "rows" else 6, may_be_told=may_be_told)
        if what == "dropout" or self.told:
            self._undo(undo)
        return wrong or (self._must_train("undone", rows=6) if self.told else "")

    def _do(self, act: Act, here: bool) -> Any:
        """Do `act` on the ranks it is of, and on the twin if it is of all; what undoes it."""
        what, alone = act.what, act.on is not None
        first, twin_first = self.net[0].weight, self.twin[0].weight
        assert isinstance(first, Tensor)
        assert isinstance(twin_first, Tensor)
        if what in SETTINGS:
            group, twin_group = self.optimizer.param_groups[0], self.twin_optimizer.param_groups[0]
            before = group[what]
            if here:
                group[what] = before * 0.5
            if not alone:
                twin_group[what] = before * 0.5
            return lambda: group.__setitem__(what, before)
        if what == "clip":
            before = self.knobs.clip
            if here:
                self.knobs.clip = before * 0.5
            if not alone:
                self.twin_clip = before * 0.5
            return lambda: setattr(self.knobs, "clip", before)
        if what == "scale":
            before, scales = self.knobs.scale, self.scales
            self.knobs.scale *= 0.5 if here else 1.0
            self.scales = _of_all(self.knobs.scale)

            def undo() -> None:
                self.knobs.scale, self.scales = before, scales

            return undo
        if what == "dropout":
            dropout: Any = self.net[1]
            dropout.p = 0.5 if here else 0.0
            return lambda: setattr(dropout, "p", 0.0)
        if what == "freeze":
            was = first.requires_grad
            first.requires_grad_(not was if here else was)
            if not alone:
                twin_first.requires_grad_(not was)
            return lambda: first.requires_grad_(was)
        if what == "save":
            self._save()
        if what == "load":
            self._load(here, alone)
            return self._from_twin
        if what == "edit":
            return self._edit([first], 0.01 if here else 0.0, alone)
        if what == "edit a state":
            states = [self.optimizer.state.get(param, {}) for param in self.model.parameters()]
            moments = [state["exp_avg"] for state in states if "exp_avg" in state]
            return self._edit(moments, 0.1 if here else 0.0, alone)
        if what == "skip" and act.on is not None:
            self.batches[act.on] += 1
        return None

    def _edit(self, tensors: Sequence[Tensor], by: float, alone: bool) -> Any:
        """Add to this rank's part of `tensors`; what undoes it."""
        for tensor in tensors:
            with torch.no_grad():
                _local(tensor).add_(by)
        if not (alone and self.is_replica):
            self._twin_from_ranks()
        return self._from_twin if tensors else None

    def _must_fail(self, act: Act, here: bool, late: bool) -> str:
        """Every rank ends with an error, at the second call if it is `late`."""
        rows = 5 if act.what == "rows" and here else 6
        for _ in range(1 + late):
            before = [_local(param).clone() for param in self.model.parameters()]
            ends = _of_all(self._call(rows, bad=act.what == "bad index" and here))
            if all(ends):
                break
            if any(ends):
                return f"some ranks trained: {ends}"
        self._note(ends)
        if not all(ends):
            return "silent divergence"
        if not all(
            ours for at, (_, ours, _) in enumerate(ends) if at != act.on and act.on is not None
        ):
            return f"an error of somebody else's: {ends}"
        after = [_local(param) for param in self.model.parameters()]
        changed = _of_all(not all(map(torch.equal, before, after)))
        return f"parameters changed though the ranks were told: {ends}" if any(changed) else ""

    def _must_train(self, what: str, rows: int, *, may_be_told: bool = False) -> str:
        """Every rank trains as one process does on the batches of all."""
        numbers = tuple(self.batches)
        ends = _of_all(self._call(rows))
        self._note(ends)
        if all(end and end[0] == "RanksApart" and _ADVICE in end[2] for end in ends):
            torch._dynamo.reset()  # what has changed on one rank alone is an input there
            numbers = tuple(self.batches)
            ends = _of_all(self._call(rows))
            self._note(ends)
        self.told = may_be_told and all(end and end[0] == "RanksApart" for end in ends)
        if all(end and end[0] == "RanksApart" and LEFT_APART in end[2] for end in ends):
            self.found.is_over = True
            return ""
        if any(ends):
            return "" if self.told else f"after {what}: {ends}"
        own = _whole(self.model.state_dict())
        every = _of_all(own)
        for name, value in own.items():
            if not all(torch.equal(value, of_rank[name]) for of_rank in every):
                return f"silent divergence after {what}: {name}"
        if what == "dropout":
            self._twin_from_ranks()
            return ""
        self._train_twin(numbers, rows)
        for param, value in zip(self.twin.parameters(), own.values(), strict=True):
            if (by := (param - value).abs().max().item()) > ROUNDING:
                return f"after {what} parameters differ from one process's by {by:.1e}"
        return ""

    def _call(self, rows: int, bad: bool = False) -> tuple[str, bool, str] | None:
        """How the call ended, if not well: its error, whether that is ours, and what it says."""
        x, y = _batch(self.batches[self.rank], self.rank, rows)
        self.batches = [number + 1 for number in self.batches]
        try:
            self.run(x, torch.full_like(y, 99) if bad else y)
        except Exception as error:
            told = str(error).partition("\n")[0][:2000]
            return type(error).__name__, isinstance(error, CotrainError), told
        return None

    def _note(self, ends: Sequence[tuple[str, bool, str] | None]) -> None:
        self.found.ends.update(end[0] if end else "trained" for end in ends)

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y) * self.knobs.scale
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.knobs.clip)
        self.optimizer.step()
        detached: Tensor = loss.detach()
        return detached

    def _train_twin(self, numbers: Sequence[int], rows: int) -> None:
        self.twin_optimizer.zero_grad()
        for rank, (number, scale) in enumerate(zip(numbers, self.scales, strict=True)):
            x, y = _batch(number, rank, rows)
            (F.cross_entropy(self.twin(x), y) * scale / self.count).backward()
        nn.utils.clip_grad_norm_(self.twin.parameters(), self.twin_clip)
        self.twin_optimizer.step()

    def _save(self) -> None:
        states = [self.model, self.optimizer, self.twin, self.twin_optimizer]
        self.saved = [copy.deepcopy(each.state_dict()) for each in states]

    def _load(self, here: bool, alone: bool) -> None:
        """Of a part of a sharded model that one rank alone loads, parameters alone."""
        if here:
            self.model.load_state_dict(self.saved[0])
            if self.is_replica or not alone:
                self._load_optimizer(self.optimizer, self.saved[1])
        if not alone:
            self.twin.load_state_dict(self.saved[2])
            self._load_optimizer(self.twin_optimizer, self.saved[3])
        elif not self.is_replica:
            self._twin_from_ranks()

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Its states; settings stay as acts have left them."""
        groups = [copy.copy(group) for group in optimizer.state_dict()["param_groups"]]
        optimizer.load_state_dict(copy.deepcopy(saved) | {"param_groups": groups})

    def _twin_from_ranks(self) -> None:
        with torch.no_grad():
            pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
            for param, twin in pairs:
                twin.copy_(_full(param))
                state = self.optimizer.state.get(param)
                if state:
                    self.twin_optimizer.state[twin] = _whole(state)

    def _from_twin(self) -> None:
        """What a program does that was told that its replicas differ."""
        with torch.no_grad():
            pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
            for param, twin in pairs:
                _local(param).copy_(twin)
                state, of_twin = self.optimizer.state[param], self.twin_optimizer.state[twin]
                for name, value in of_twin.items():
                    if name in state:
                        _local(state[name]).copy_(value)
                    else:  # what was loaded is of before the first step
                        state[name] = value.clone()

    def _undo(self, undo: Any) -> None:
        if undo is not None:
            undo()


def _batch(number: int, rank: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(rows, 8, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def _local(value: Any) -> Tensor:
    local: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()


def _is_whole(value: Any) -> bool:
    """Whether every rank has all of it."""
    is_parted = isinstance(value, DTensor)
    return not is_parted or all(place.is_replicate() for place in value.placements)


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _whole(values: Any) -> dict[str, Any]:
    """Copies of them, gathered from all ranks; plain numbers stay."""
    return {
        str(name): full.detach().clone() if isinstance(full := _full(value), Tensor) else full
        for name, value in values.items()
    }
