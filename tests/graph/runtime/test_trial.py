"""A fused kernel is used where its numbers are those of the captured ops, whatever they are of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from cotrain_compile.runtime.host.trial import PERIOD, agree

LARGE = 3 * PERIOD + 1
Update = Callable[[Tensor, Tensor, Tensor], object]


def region_of(count: int) -> fx.GraphModule:
    """Of a parameter of `count` elements, a bucket of twice as many gradients, and a flag."""
    graph = fx.Graph()
    for name, shape in (("param", (count,)), ("bucket", (2 * count,)), ("is_skipped", ())):
        graph.placeholder(name).meta["val"] = torch.empty(shape)
    graph.output(())
    return fx.GraphModule({}, graph)


def passes(update: Update, count: int) -> bool:
    """Whether `update` is taken for what leaves a parameter alone where the flag says so."""

    def exact(param: Tensor, bucket: Tensor, is_skipped: Tensor) -> object:
        return None if is_skipped else param.sub_(bucket[count:])

    def kernel(of: Update) -> Callable[[Any, Any], None]:
        def run(inputs: Any, _: Any) -> None:
            of(*inputs)

        return run

    settings: Any = {"param": 0, "fixed": {}, "never_negative": (), "skip": 2}
    return agree(region_of(count), kernel(exact), kernel(update), **settings)


@pytest.mark.parametrize("count", [5, LARGE])
def test_what_computes_the_same_passes(count: int) -> None:
    def other(param: Tensor, bucket: Tensor, is_skipped: Tensor) -> object:
        return param.add_(torch.where(is_skipped.bool(), 0, bucket[count:]), alpha=-1)

    assert passes(other, count)


@pytest.mark.parametrize("count", [5, LARGE])
def test_an_update_that_is_not_skipped_or_always_is_found_out(count: int) -> None:
    assert not passes(lambda param, bucket, _: param.sub_(bucket[count:]), count)
    assert not passes(lambda *_: None, count)


@pytest.mark.parametrize("count", [5, LARGE, 4096])
def test_another_part_of_a_bucket_is_other_numbers(count: int) -> None:
    def wrong(param: Tensor, bucket: Tensor, is_skipped: Tensor) -> object:
        return None if is_skipped else param.sub_(bucket[:count])

    assert not passes(wrong, count)
