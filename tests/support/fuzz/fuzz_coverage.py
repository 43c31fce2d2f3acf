"""What random programs have tried: kinds of ops, and which op reads the result of which.

In: a spec. Out: the kinds and ordered pairs of its first step in eager, forward, backward and
update; and, of several specs, the one that tries most of what was tried least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tests.support.fuzz.fuzz_parts import (
    make_batches,
    make_edits,
    make_masters,
    make_model,
    make_optimizers,
    make_step,
)
from tests.support.fuzz.fuzz_specs import Spec

# Between the two kinds of a pair: the first makes what the second reads.
READ_BY = " > "
# How an argument lies in memory is part of what is tried, where it is not plain.
ODD = "*"


class Pairs(TorchDispatchMode):
    """Notes each op that runs, and pairs of an op with those whose results it reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self._made_by: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = str(func.overloadpacket).removeprefix("aten.")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.found.add(kind)
        for value in given:
            odd = "" if value.is_contiguous() else ODD
            self.found.add(f"{self._made_by.get(value, 'input')}{odd}{READ_BY}{kind}")
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._made_by[value] = kind
        return result


def tried_by(spec: Spec) -> set[str]:
    """Kinds and pairs of the first step of `spec` in eager; none where that fails."""
    torch.manual_seed(spec.seed)
    pairs, dtype = Pairs(), getattr(torch, spec.model.dtype)
    try:
        model, (batch, *_) = make_model(spec, dtype), make_batches(spec, dtype)
        edits, masters = make_edits(spec, model), make_masters(spec, model)
        optimizers = make_optimizers(spec, model, masters, is_eager=True)
        step = make_step(spec, model, optimizers, edits, masters)
        with pairs:
            step(*batch)
    except Exception:
        return set()
    return pairs.found


def newest(specs: Sequence[Spec], seen: Counter[str]) -> tuple[Spec, set[str]]:
    """The spec of `specs` that tries most of what was `seen` least, and what it tries."""
    tried = [(spec, tried_by(spec)) for spec in specs]
    return max(tried, key=lambda one: sum(1 / (1 + seen[what]) ** 2 for what in one[1]))


def figures(seen: Counter[str]) -> dict[str, Any]:
    """How often each kind was tried, and how many pairs."""
    pairs = [what for what in seen if READ_BY in what]
    return {
        "ops": dict(sorted((what, n) for what, n in seen.items() if READ_BY not in what)),
        "pairs": len(pairs),
        "pairs_with_odd_layouts": sum(ODD + READ_BY in pair for pair in pairs),
        "pairs_tried_once": sum(seen[pair] == 1 for pair in pairs),
    }
