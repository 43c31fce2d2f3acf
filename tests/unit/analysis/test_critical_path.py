"""The longest chain of dependent ops, and how much later the others may start."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.analysis.critical_path import critical_path, dependencies
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


def test_the_shorter_branch_has_slack() -> None:
    step = _step(("start", "", "ab"), ("long", "a", "c"), ("short", "b", "d"), ("end", "cd", "e"))
    path = critical_path(step, {"start": 1.0, "long": 5.0, "short": 2.0, "end": 1.0})
    assert path.seconds == 7.0
    assert path.ops == ("start", "long", "end")
    assert path.slack == {"start": 0.0, "long": 0.0, "short": 3.0, "end": 0.0}
    assert (path.earliest_s["short"], path.latest_s["short"]) == (1.0, 4.0)


def test_the_updates_of_a_chain_are_off_the_path_except_the_one_that_ends_last() -> None:
    step = chain(3)
    path = critical_path(step, {op.name: 1.0 for op in step.ops})
    assert path.seconds == 3 + 1 + 3 + 1
    assert path.ops[-2:] == ("backward_0", "update_0")
    assert path.slack["update_2"] == 2.0


def test_a_step_without_ops_takes_no_time() -> None:
    assert critical_path(_step(), {}).seconds == 0.0


@given(random_dataflows(), st.data())
def test_it_is_the_longest_path_and_slack_moves_nothing(
    step: Dataflow, data: st.DataObject
) -> None:
    times = st.floats(0, 100)
    seconds = {op.name: data.draw(times) for op in step.ops}
    path = critical_path(step, seconds)
    graph = dependencies(step)
    weighted: networkx.DiGraph[str] = networkx.DiGraph()
    weighted.add_nodes_from([*graph, "end"])
    weighted.add_weighted_edges_from((a, b, seconds[a]) for a, b in graph.edges)
    weighted.add_weighted_edges_from((a, "end", seconds[a]) for a in graph)
    assert path.seconds == pytest.approx(networkx.dag_longest_path_length(weighted))
    assert path.seconds == pytest.approx(sum(seconds[name] for name in path.ops))
    for before, after in graph.edges:
        assert path.latest_s[before] + seconds[before] <= path.latest_s[after] + 1e-9
        assert path.earliest_s[before] + seconds[before] <= path.earliest_s[after]
    assert all(path.slack[name] == 0.0 for name in path.ops)
