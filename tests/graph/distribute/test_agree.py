"""Ranks that train together compile the same step by one plan, or are told why they cannot."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._dispatch.python import enable_python_dispatcher

from cotrain_compile.distribute.agree import Together
from tests.support import ddp_cases
from tests.support.ranks import Ranks


def test_different_batches_are_an_error_on_every_rank(two_ranks: Ranks) -> None:
    for told in two_ranks.run(ddp_cases.of_different_shapes):
        assert "the ranks compiled different steps" in told
        assert "rank 0: " in told
        assert "batch x (4, 8), y (4,)" in told
        assert "batch x (5, 8), y (5,)" in told


def test_the_least_budget_of_all_ranks_is_that_of_their_plan(two_ranks: Ranks) -> None:
    (budgets, tasks), other = two_ranks.run(ddp_cases.with_different_budgets)
    assert (budgets, tasks) == other
    assert tasks


def test_where_one_rank_runs_out_of_memory_all_plan_again(two_ranks: Ranks) -> None:
    (peak_bytes, moves, placement), other = two_ranks.run(ddp_cases.with_one_rank_out_of_memory)
    assert (peak_bytes, moves, placement) == other
    assert moves


def test_ranks_talk_without_pythons_lock_also_within_a_trace() -> None:
    """A thread of gloo waits for that lock, to free tensors, and ends no exchange till then."""
    by_python = []

    def gather(found: list[Any], value: Any, group: Any) -> None:
        key = torch._C.DispatchKey.PythonDispatcher
        by_python.append(torch._C._dispatch_tls_is_dispatch_key_included(key))
        found[0] = value

    with (
        mock.patch.object(dist, "all_gather_object", gather),
        mock.patch.object(dist, "get_world_size", return_value=1),
        mock.patch.object(dist, "get_rank", return_value=1),
        enable_python_dispatcher(),
    ):
        assert Together(object()).least({}) == {}
    assert by_python == [False]
