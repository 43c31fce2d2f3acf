"""Rank order: the ops of a rank, in order, with the exchanges between them.

In: ops one by one, and exchanges where they are due. Out: the ops, the buffers that exchanges make.
What reads the result of an exchange that is not yet awaited waits for it. No torch.
"""

from __future__ import annotations

from collections.abc import Collection

from cotrain_compile.dataflow import Buffer, Collective, Op, Role

_GROUP = "group.ranks"


class RankOrder:
    """The ops so far of one of so many ranks; `awaited` are the results of exchanges to come."""

    def __init__(self, ranks: int, awaited: Collection[str]) -> None:
        self.ranks = ranks
        self.ops: list[Op] = []
        self.made: dict[str, Buffer] = {}
        self._unmade = set(awaited)
        self._held: list[Op] = []

    def part_bytes(self, nbytes: int) -> int:
        """What each rank has of so many bytes, the last part padded."""
        return -(-nbytes // self.ranks)

    def add(self, op: Op) -> None:
        """Now, or, if it waits for an exchange or for what is held, behind that."""
        made = {name for held in self._held for name in held.writes}
        touched = made.union(*(held.reads for held in self._held))
        if (self._unmade | made).intersection(op.reads) or touched.intersection(op.writes):
            self._held.append(op)
        else:
            self.ops.append(op)

    def begin(self, kind: str, reads: tuple[str, ...], made: tuple[Buffer, ...], near: Op) -> Op:
        """Begin an exchange of all of `reads` beside op `near`, and return what awaits it.

        A reduction of the whole works on a copy; until the others end they hold what they read.
        """
        self.made.setdefault(_GROUP, Buffer(_GROUP, 0, Role.GROUP, is_input=True, is_output=True))
        self.made |= {buffer.name: buffer for buffer in made}
        writes = tuple(buffer.name for buffer in made)
        results = sum(buffer.nbytes for buffer in made)
        whole = results * (self.ranks if kind.startswith("reduce_scatter") else 1)
        given = results if kind == "all_reduce" else self.part_bytes(whole)
        begin = Op(
            f"{kind}.{writes[0]}",
            kind,
            near.phase,
            (*reads, _GROUP),
            (_GROUP, *writes),
            bytes_moved=given + whole,
            module=near.module,
            collective=Collective(kind, self.ranks, whole),
        )
        self.ops.append(begin)
        held = () if kind == "all_reduce" else reads
        return Op(
            f"wait.{begin.name}",
            "wait_tensor",
            near.phase,
            (*writes, *held),
            writes,
            module=near.module,
            awaits=begin.name,
        )

    def end(self, *waits: Op) -> None:
        """Await exchanges, and then what has waited for them."""
        self.ops += waits
        self._unmade.difference_update(name for wait in waits for name in wait.writes)
        held, self._held = self._held, []
        for op in held:
            self.add(op)
