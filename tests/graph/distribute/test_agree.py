"""Ranks that train together compile the same step by one plan, or are told why they cannot."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from cotrain_compile.dataflow import Role
from cotrain_compile.distribute.agree import Together
from cotrain_compile.distribute.meet import Meeting
from cotrain_compile.distribute.ranks import (
    groups_apart,
    note_unequal_batches,
    signature_of_step,
)
from cotrain_compile.graph import StepGraph, StepInput
from tests.support import ddp_cases, ranks_apart, ranks_of_other_numbers
from tests.support.ranks import Ranks


def test_what_one_rank_alone_meets_is_an_error_on_every_rank_at_once(two_ranks: Ranks) -> None:
    """It is one before anything is exchanged, so that all can go on with the next batch."""
    first, second = two_ranks.run(ranks_apart.in_turn)
    for found in (first, second):
        assert all(kind == "" for what, (kind, _) in found.items() if what.startswith("after"))
        assert found["other shapes"][0] == found["a new shape"][0] == "RanksApart"
        assert "compiled different steps" in found["other shapes"][1]
        told = found["a new shape"][1]
        assert re.search(r"rank 0: runs step \(.*\.py:\d+\) with 4 coll.*batch x \(4, 8\)", told)
        assert re.search(r"is at .*\.py:\d+ in step: `loss\.backward\(\)`; rank 1: compiles", told)
        assert "batch x (7, 8)" in told
        assert "drop_last=True), or pad the last batch to it" in told
        assert found["both in the backward"][0] == "OutOfDeviceMemory"
    assert first["a refusal"][0] == first["out of memory"][0] == "RanksApart"
    assert "rank 1: failed: CaptureError: " in first["a refusal"][1]
    assert "rank 1: failed: OutOfDeviceMemory: for once" in first["out of memory"][1]
    assert second["a refusal"][0] == "CaptureError"
    assert second["out of memory"][0] == "OutOfDeviceMemory"


def test_ranks_that_would_update_with_different_numbers_are_told_which(two_ranks: Ranks) -> None:
    for told in two_ranks.run(ranks_of_other_numbers.clipped_apart):
        assert "clip_grad_norm_(model.parameters(), clip)` computes with 1.0 (mul" in told
        assert "on rank 0 and 0.1 (mul.Tensor) on rank 1" in told
    for told in two_ranks.run(ranks_of_other_numbers.decayed_apart):
        assert "weight_decay is 0.01 on rank 0 and 0.5 on rank 1 (for module.weight and" in told


def test_rates_and_parameters_of_one_rank_alone_are_found_while_it_trains(two_ranks: Ranks) -> None:
    for rates, edited in two_ranks.run(ranks_of_other_numbers.changed_between):
        assert "param_groups.0.lr is 0.1 on rank 0 and 0.3 on rank 1" in rates[0]
        assert rates[1] == ""
        told = [text for text in edited if text]
        assert told
        assert all("module.bias is not the same on ranks 0 and 1" in text for text in told)


@pytest.mark.long  # in every run they agree on one behind a lack of memory
def test_the_least_budget_of_all_ranks_is_that_of_their_plan(two_ranks: Ranks) -> None:
    (budgets, tasks), other = two_ranks.run(ddp_cases.with_different_budgets)
    assert (budgets, tasks) == other
    assert tasks


def test_where_one_rank_runs_out_of_memory_all_plan_again(two_ranks: Ranks) -> None:
    (peak_bytes, moves, placement), other = two_ranks.run(ddp_cases.with_one_rank_out_of_memory)
    assert (peak_bytes, moves, placement) == other
    assert moves


def reduced_over(*groups: str) -> StepGraph:
    """A step that sums its batch over these groups, one after the other."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for group in groups:
        reduce = torch.ops._c10d_functional.all_reduce.default
        value = graph.call_function(reduce, (value, "sum", group))
    graph.output((value,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return StepGraph(module, (StepInput("x", "x", Role.BATCH),), {})


def test_groups_of_a_mesh_have_other_names_on_each_rank() -> None:
    """What counts is which of them comes when."""
    step, same = reduced_over("1", "3", "1"), reduced_over("2", "4", "2")
    other = reduced_over("2", "4", "4")
    assert step.fingerprint == same.fingerprint != other.fingerprint
    assert signature_of_step(step) == signature_of_step(same) != signature_of_step(other)


def test_batches_of_other_sizes_are_alike_where_they_are_meant() -> None:
    def step() -> None: ...

    def weighted() -> None: ...

    note_unequal_batches(weighted.__code__)
    few, many = reduced_over("0"), reduced_over("0")
    for graph, rows in ((few, 3), (many, 5)):
        graph.nodes[0].meta["val"] = torch.empty(rows)
    assert signature_of_step(few, step.__code__) != signature_of_step(many, step.__code__)
    assert signature_of_step(few, weighted.__code__) == signature_of_step(many, weighted.__code__)


def test_ranks_with_other_meshes_are_told_which_exchange_they_do_not_share() -> None:
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    mesh = {rank: (rows[rank // 2], columns[rank % 2]) for rank in range(4)}
    assert groups_apart(mesh) == ""
    told = groups_apart({**mesh, 3: (columns[1], rows[1])})
    assert told == "rank 1 exchanges with ranks [1, 3] what rank 3 exchanges with [2, 3]"


def test_ranks_talk_without_pythons_lock_also_within_a_trace() -> None:
    """A thread of gloo waits for that lock, to free tensors, and ends no exchange till then."""
    by_python = []

    def note(*_: Any) -> mock.Mock:
        key = torch._C.DispatchKey.PythonDispatcher
        by_python.append(torch._C._dispatch_tls_is_dispatch_key_included(key))
        return mock.Mock()

    def gather(found: list[Any], value: Any, group: Any) -> None:
        note()
        found[0] = value

    group = mock.Mock()
    group.allreduce.side_effect = note
    with (
        mock.patch.object(dist, "all_gather_object", gather),
        mock.patch.object(dist, "get_world_size", return_value=1),
        enable_python_dispatcher(),
    ):
        assert Together(Meeting(group)).least({}) == {}
    assert by_python == [False, False]
