"""Updates on the host keep to the cores they are given; nobody else is told where to run."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

import pytest
import torch

import cotrain_compile
from cotrain_compile.errors import OptionError
from cotrain_compile.options import Options
from cotrain_compile.runtime.process.cores import usable_cores
from tests.support.held_back import with_kernels
from tests.support.steps import cotrain, cross_entropy, make_mlp, make_step, vectors

pytestmark = pytest.mark.usefixtures("watchdog")

Where = tuple[frozenset[int], int]


def here() -> Where:
    return frozenset(os.sched_getaffinity(0)), torch.get_num_threads()


def in_new_thread() -> Where:
    found: list[Where] = []
    thread = threading.Thread(target=lambda: found.append(here()))
    thread.start()
    thread.join()
    return found[0]


def test_updates_run_on_the_cores_they_are_given_and_nothing_else_does() -> None:
    core = max(usable_cores())
    before, before_elsewhere = here(), in_new_thread()
    model = make_mlp().train()
    optimizer = torch.optim.AdamW(model.parameters())
    compile_with = cotrain(policy="zero-offload", host_cores=[core])
    step = compile_with(make_step(model, [optimizer], cross_entropy))
    step(*vectors())
    seen: set[Where] = set()

    def noting(name: str, kernel: Any) -> Any:
        def run(*arguments: Any) -> None:
            seen.add(here())
            kernel(*arguments)

        return run

    with with_kernels(cotrain_compile.inspect(step), noting):
        step(*vectors())
    assert seen == {(frozenset({core}), 1)}
    assert here() == before
    assert in_new_thread() == before_elsewhere


@pytest.mark.parametrize("wrong", [[], "all", [-1], [1.5], 3])
def test_cores_are_a_list_of_numbers(wrong: object) -> None:
    with pytest.raises(OptionError, match=r"'host_cores' is .* but must be a list of core numbers"):
        Options.parse({"host_cores": wrong})


def test_a_core_that_is_not_ours_is_refused() -> None:
    ours = frozenset({0, 1})
    with (
        mock.patch("cotrain_compile.options.parsers.os.sched_getaffinity", return_value=set(ours)),
        pytest.raises(OptionError, match=r"of the cores of this process \(0, 1\)"),
    ):
        Options.parse({"host_cores": [1, 2]})
