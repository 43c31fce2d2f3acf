"""Calls of a step: of other batches, in other places, with something around them."""

from __future__ import annotations

import random
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.support.sequences.registry import action
from tests.support.sequences.twin import ROWS, Training


@action
def call(training: Training, rng: random.Random) -> Any:
    """Some calls with the usual batch."""
    return [training.call("train", *training.batch()) for _ in range(rng.randint(1, 2))]


@action
def call_other_rows(training: Training, rng: random.Random) -> Any:
    return training.call("train", *training.batch(rng.choice([2, 3, 6, 9])))


@action
def call_one_row(training: Training, rng: random.Random) -> Any:
    return training.call("train", *training.batch(1))


@action
def call_other_dtype(training: Training, rng: random.Random) -> Any:
    x, y = training.batch()
    return training.call("train", x.to(rng.choice([torch.float32, torch.float64])), y)


@action
def call_wrong_width(training: Training, rng: random.Random) -> Any:
    x, y = training.batch()
    return training.call("train", x[:, 1:], y)


@action
def call_with_gaps(training: Training, rng: random.Random) -> Any:
    x, y = training.batch()
    return training.call("train", x.T.contiguous().T if rng.random() < 0.5 else x[:, :].flip(0), y)


@action
def call_that_needs_a_gradient(training: Training, rng: random.Random) -> Any:
    x, y = training.batch()
    x.requires_grad_()
    return [training.call("train", x, y), x.grad]


@action
def call_that_fails(training: Training, rng: random.Random) -> Any:
    training.model.fails = True
    try:
        return training.call("train", *training.batch())
    finally:
        training.model.fails = False


@action
def call_that_fails_late(training: Training, rng: random.Random) -> Any:
    """After its backward, before it updates."""
    training.fails_late = True
    try:
        return training.call("train", *training.batch())
    finally:
        training.fails_late = False


@action
def call_in_a_thread(training: Training, rng: random.Random) -> Any:
    """As `call`, in another thread: random numbers come from the one generator of the CPU."""
    returned: list[Any] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            returned.append(training.call("train", *training.batch()))
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return returned


@action
def call_other_loss(training: Training, rng: random.Random) -> Any:
    return training.call("other", *training.batch())


@action
def accumulate(training: Training, rng: random.Random) -> Any:
    losses = [training.call("collect", *training.batch()) for _ in range(rng.randint(1, 2))]
    training.call("update")
    return losses


@action
def call_without_grad(training: Training, rng: random.Random) -> Any:
    with torch.no_grad():
        return training.call("train", *training.batch())


@action
def call_with_tensors_of_the_model(training: Training, rng: random.Random) -> Any:
    """The batch is a parameter, or a view of one, which the step writes."""
    weight = training.model.first.weight.detach()
    x = weight if rng.random() < 0.5 else weight[:ROWS]
    return training.call("train", x, torch.zeros(len(x), dtype=torch.long))


@action
def call_with_a_batch_that_is_kept(training: Training, rng: random.Random) -> Any:
    """One batch in two calls, changed in place between them."""
    x, y = training.batch()
    first = training.call("train", x, y)
    x.mul_(0.5)
    return [first, training.call("train", x, y)]


@action
def call_under_a_mode(training: Training, rng: random.Random) -> Any:
    """Within what other programs have around a call, and what changes no number."""
    around: AbstractContextManager[Any] = rng.choice(
        [
            torch.enable_grad(),
            torch.random.fork_rng(),
            torch.autograd.set_multithreading_enabled(False),
            torch.autograd.profiler.record_function("step"),
        ]
    )
    with around:
        return training.call("train", *training.batch())


@action
def call_under_saved_tensor_hooks(training: Training, rng: random.Random) -> Any:
    """What is saved for the backward is changed on its way, or may be written in between."""
    graph = torch.autograd.graph
    around: AbstractContextManager[Any] = rng.choice(
        [
            graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 1.5),
            graph.allow_mutation_on_saved_tensors(),
        ]
    )
    with around:
        return training.call("train", *training.batch())
