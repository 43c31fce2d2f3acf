"""Traced again: what fake tensors say of a node with the values that its inputs have now.

Private torch API used: `FakeTensor`, `disable_fake_tensor_cache`. Tried on torch 2.11.0, 2.13.0 and
2.15.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache
from torch.utils._pytree import tree_leaves, tree_map

from cotrain_compile.graph.collectives import is_wait


def traced_again(node: fx.Node) -> Any:
    """The value of `node`, a call, made from those of its inputs; what memory it shows is theirs.

    The mode's cache of results is left alone: it does not look at storages.
    """
    args, kwargs = tree_map(
        lambda arg: arg.meta["val"] if isinstance(arg, fx.Node) else arg, (node.args, node.kwargs)
    )
    # What its fake kernel makes is new; the real one returns its argument.
    target: Any = torch.ops.aten.alias.default if is_wait(node) else node.target
    known = tree_leaves((args, kwargs, node.meta.get("val")))
    fake = next((leaf for leaf in known if isinstance(leaf, FakeTensor)), None)
    if fake is None:
        return target(*args, **kwargs)
    with fake.fake_mode, disable_fake_tensor_cache(fake.fake_mode):
        return target(*args, **kwargs)
