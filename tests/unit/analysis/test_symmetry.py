"""Merging alike nodes keeps the minimum cut, and shrinks what repeats."""

from __future__ import annotations

import networkx
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.analysis.symmetry import merged

ENDS: dict[object, str] = {"s": "source", "t": "sink"}


@st.composite
def repeated_graphs(draw: st.DrawFn) -> networkx.DiGraph[object]:
    """Copies of one random part between a source and a sink, some of them disturbed."""
    size = draw(st.integers(1, 4))
    inner = st.tuples(st.integers(-1, size), st.integers(-1, size), st.integers(1, 4))
    part = draw(st.lists(inner, max_size=8))
    graph: networkx.DiGraph[object] = networkx.DiGraph()
    graph.add_nodes_from(ENDS)
    for copy in range(draw(st.integers(1, 4))):
        extra = draw(st.lists(inner, max_size=2))
        for a, b, capacity in (*part, *extra):
            edge = ["s" if node == -1 else "t" if node == size else (copy, node) for node in (a, b)]
            if edge[0] != edge[1]:
                graph.add_edge(*edge, capacity=capacity)
    return graph


@given(repeated_graphs())
def test_the_minimum_cut_of_the_merged_graph_is_that_of_the_whole(
    graph: networkx.DiGraph[object],
) -> None:
    small, alike = merged(graph, ENDS)
    assert len(small) <= len(graph)
    expected, _ = networkx.minimum_cut(graph, "s", "t")
    assert networkx.minimum_cut(small, alike["s"], alike["t"])[0] == expected


def test_equal_layers_are_one_class_each() -> None:
    graph: networkx.DiGraph[object] = networkx.DiGraph()
    for layer in range(50):
        graph.add_edge("s", ("a", layer), capacity=3)
        graph.add_edge(("a", layer), ("b", layer), capacity=2)
        graph.add_edge(("b", layer), "t", capacity=3)
    small, alike = merged(graph, ENDS)
    assert len(small) == 4
    assert small.edges[alike["a", 0], alike["b", 0]]["capacity"] == 100


def test_a_layer_of_another_size_keeps_its_own_class() -> None:
    graph: networkx.DiGraph[object] = networkx.DiGraph()
    for layer, capacity in enumerate((2, 2, 5)):
        graph.add_edge("s", layer, capacity=capacity)
        graph.add_edge(layer, "t", capacity=capacity)
    _, alike = merged(graph, ENDS)
    assert alike[0] == alike[1] != alike[2]
