"""Sizes that depend on data: a tensor as large as the elements that a mask selects is refused.

A plan knows how many bytes are alive at every op, before the step runs. Ops that look at data to
raise an error, as `torch.linalg.solve` does where a matrix is singular, are refused as well.

Private torch API used: `free_unbacked_symbols`, the `example_value` and `stack_trace` of Dynamo's
nodes, the op `with_effects` by which AOTAutograd keeps such a check. Tried on torch 2.13.0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cotrain_compile.errors import CaptureError
from cotrain_compile.graph.user_lines import user_line

# What raises for a singular matrix, with the name in torch.linalg of the one that does not, without
# its `_ex`. A function of the user's may have any of these names, so torch's are told by identity.
_RAISING = {
    **{
        getattr(torch.linalg, name): name
        for name in ("solve", "inv", "cholesky", "ldl_factor", "lu_factor")
    },
    torch.inverse: "inv",
    torch.cholesky: "cholesky",
}
_RAISING_METHODS = {"inverse": "inv", "cholesky": "cholesky"}


def refuse_sizes_from_data(module: fx.GraphModule) -> None:
    """Raise `CaptureError` for the first op whose result has a size that only its data tells."""
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
            raise _size_from_data(node)


def size_behind(symbols: Iterable[str], graph: fx.Graph | None) -> CaptureError | None:
    """The refusal of the first tensor in `graph` one of whose sizes is one of `symbols`."""
    for node in graph.nodes if graph is not None else ():
        value = node.meta.get("example_value")
        found = free_unbacked_symbols(value) if isinstance(value, torch.Tensor) else ()
        if {*symbols} & {str(symbol) for symbol in found}:
            return _size_from_data(node)
    return None


def _size_from_data(node: fx.Node) -> CaptureError:
    way = (
        "Keep the size: in place of x[mask] weigh every element "
        "(torch.where(mask, x, 0), and divide the sum by mask.sum(); where the loss takes "
        "ignore_index=-100, mark the targets so), in place of "
        "x[:n] pad to a fixed length and mask the rest; or select outside the step"
    )
    if f"torch_geometric{os.sep}" in (node.meta.get("stack_trace") or ""):
        way = (
            "Make a layer that adds self-loops with add_self_loops=False, and add the loops to the "
            "edges before the step: torch_geometric.utils.add_remaining_self_loops"
        )
    return CaptureError(
        f"{_line_of(node)}: the size of this result depends on the data, so no plan knows "
        f"how much memory it takes. {way}"
    )


def refuse_linear_algebra_that_raises(module: fx.GraphModule) -> None:
    """Raise `CaptureError` for the first op that raises in eager where a matrix is singular.

    From torch 2.13 on `refuse_checks_of_data` would see it; before, AOTAutograd drops the check.
    """
    for node in module.graph.nodes:
        raising = _RAISING_METHODS if node.op == "call_method" else _RAISING
        if called := raising.get(node.target):
            _refuse_check(called, f"{_line_of(node)}: ")


def refuse_checks_of_data(graph: fx.Graph) -> None:
    """Raise `CaptureError` for the first op of an ATen graph that may raise by what data says."""
    for node in graph.nodes:
        if str(node.target) != "with_effects":
            continue
        op, *rest = node.args[1:]
        called = next((arg for arg in rest if isinstance(arg, str)), "").rpartition(".")[2]
        where = f"{_line_of(node)}: " if node.meta.get("stack_trace") else ""
        if hasattr(torch.linalg, f"{called}_ex"):
            _refuse_check(called, where)
        raise CaptureError(
            f"{where}{op} acts on something other than tensors, which a captured step cannot. "
            "Move it out of the step"
        )


def _refuse_check(called: str, where: str) -> NoReturn:
    raise CaptureError(
        f"{where}torch.linalg.{called} looks at its result to raise an error, which a "
        f"captured step cannot. Use torch.linalg.{called}_ex(...)[0], which does not look "
        "(info, the last that it returns, says after the step whether it went well)"
    )


def _line_of(node: fx.Node) -> str:
    """The user's line that made `node`, as `file:line in function: source`."""
    return user_line(node.meta.get("stack_trace")) or f"op {node.name}"
