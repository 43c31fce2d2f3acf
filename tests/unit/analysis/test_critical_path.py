"""The longest chain of dependent ops."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.analysis.reuse import critical_path_s, dependencies
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from tests.support.dataflows import chain, random_dataflows


def _step(*ops: tuple[str, str, str]) -> Dataflow:
    names = sorted({name for _, reads, writes in ops for name in reads + writes})
    buffers = tuple(Buffer(name, 1, Role.TEMPORARY, is_input=True) for name in names)
    calls = (Op(n, "test", Phase.FORWARD, tuple(r), tuple(w)) for n, r, w in ops)
    return Dataflow("step", tuple(calls), buffers)


def test_edges_follow_reads_and_writes() -> None:
    step = _step(
        ("w1", "", "x"), ("r1", "x", ""), ("r2", "x", ""), ("w2", "", "x"), ("r3", "x", "")
    )
    assert set(dependencies(step).edges) == {
        ("w1", "r1"),
        ("w1", "r2"),
        ("w1", "w2"),
        ("r1", "w2"),
        ("r2", "w2"),
        ("w2", "r3"),
    }


def test_an_update_in_place_does_not_wait_for_itself() -> None:
    step = _step(("a", "x", "x"), ("b", "x", "x"))
    assert list(dependencies(step).edges) == [("a", "b")]


def test_the_longer_branch_counts() -> None:
    step = _step(("start", "", "ab"), ("long", "a", "c"), ("short", "b", "d"), ("end", "cd", "e"))
    assert critical_path_s(step, {"start": 1.0, "long": 5.0, "short": 2.0, "end": 1.0}) == 7.0


def test_the_updates_of_a_chain_are_off_the_path_except_the_one_that_ends_last() -> None:
    step = chain(3)
    assert critical_path_s(step, {op.name: 1.0 for op in step.ops}) == 3 + 1 + 3 + 1


def test_a_step_without_ops_takes_no_time() -> None:
    assert critical_path_s(_step(), {}) == 0.0


@given(random_dataflows(), st.data())
def test_it_is_the_longest_path(step: Dataflow, data: st.DataObject) -> None:
    times = st.floats(0, 100)
    seconds = {op.name: data.draw(times) for op in step.ops}
    graph = dependencies(step)
    weighted: networkx.DiGraph[str] = networkx.DiGraph()
    weighted.add_nodes_from([*graph, "end"])
    weighted.add_weighted_edges_from((a, b, seconds[a]) for a, b in graph.edges)
    weighted.add_weighted_edges_from((a, "end", seconds[a]) for a in graph)
    longest_s = networkx.dag_longest_path_length(weighted)
    assert critical_path_s(step, seconds) == pytest.approx(longest_s)
