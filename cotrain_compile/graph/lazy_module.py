"""Lazy modules: a graph as a module whose Python source is generated when it is first called.

Most graphs are rewritten, interpreted or handed to Inductor, and never called as they are. Writing
and compiling their source would be a third of the time that a placed step takes to rewrite.

Private torch API used: `torch.fx._lazy_graph_module._LazyGraphModule`, an `fx.GraphModule` that
does this. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(root: nn.Module | Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """`graph` as a module with what it names of `root`: attributes and submodules."""
    return _LazyGraphModule(root, graph)  # type: ignore[arg-type]
