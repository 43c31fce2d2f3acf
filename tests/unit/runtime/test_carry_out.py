"""What carries out a node: waits that stand side by side."""

from collections.abc import Sequence

from torch import fx

from cotrain_compile.runtime.carry_out import carrying_out
from cotrain_compile.runtime.ops import cotrain
from cotrain_compile.runtime.task_nodes import view_of


class Noting:
    """A runtime that notes what it is to wait for."""

    def __init__(self) -> None:
        self.waits: list[Sequence[str]] = []

    def wait(self, tasks: Sequence[str]) -> None:
        self.waits.append(tasks)


def test_waits_side_by_side_are_one() -> None:
    graph = fx.Graph()
    for tasks in (["a"], ["b", "c"], ["x"]):
        graph.call_function(cotrain.wait, (tasks, []))
    value = graph.call_function(cotrain.wait_previous, (["d"],))
    graph.call_function(cotrain.wait, (["e"], []))
    noting = Noting()
    for node in graph.nodes:
        view = view_of(node)
        if view is not None and node is not value:
            carrying_out(node, view, alongside=False)(noting, {}.__getitem__)  # type: ignore[arg-type]
    assert noting.waits == [["a", "b", "c", "x"], ["b", "c"], ["x"], ["e"]]
