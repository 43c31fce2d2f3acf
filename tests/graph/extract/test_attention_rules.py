"""A fused kernel whose mask is trained stays whole: all sequences may share the mask."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from cotrain_compile.extract.regions.calls import PartCall
from cotrain_compile.extract.regions.layer_rules import SAMPLES
from cotrain_compile.extract.regions.rules import outcome_of

aten = torch.ops.aten


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_mask_that_is_trained_keeps_attention_whole(is_trained: bool) -> None:
    graph, value = fx.Graph(), torch.empty(4, 2, 8, 16)
    names = ("grad", "query", "key", "value", "bias", "out", "sums", "seed", "offset")
    given = [graph.placeholder(name) for name in names]
    for node in given:
        node.meta["val"] = value
    given[4].meta["val"] = torch.empty(1, 2, 8, 8)
    backward = graph.call_function(
        aten._scaled_dot_product_efficient_attention_backward.default,
        (*given, 0.0, [True, True, True, is_trained]),
    )
    backward.meta["val"] = (value, value, value, torch.empty(1, 2, 8, 8) if is_trained else None)
    outcome = outcome_of(PartCall(backward, {given[1]: SAMPLES}, 4))
    if is_trained:
        assert outcome is None
    else:
        assert outcome is not None
        assert outcome.made == (SAMPLES, SAMPLES, SAMPLES, None)
        assert set(outcome.needs) == {given[0], given[2], given[3], given[5], given[6]}
