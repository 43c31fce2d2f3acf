"""How large a model can each way train when the card had less memory? A search over depths.

In: a card's memory capped at some bytes, and ways to train. Out: for each the deepest GPT of one
width whose step runs. A cap is a share of the card that torch's allocator may take; this package
has it as its budget, too.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.gpu.model import SIZES, VOCABULARY, Size, Training
from bench.gpu.peers import PEERS, Step
from cotrain_compile.demo.job import Shape
from cotrain_compile.errors import OutOfDeviceMemory, PlacementError

GIB = 2**30
CAPS_BYTES = (24 * GIB, 80 * GIB)
LAYERS = (2, 4, 8, 12, 16, 20)
# A cap is for all that the process takes on the card; libraries need some of it.
FOR_LIBRARIES = 0.05

Session = Callable[[Size, str], contextlib.AbstractContextManager[Step]]


def deep(layers: int, device: str) -> Size:
    """A GPT of the width of a 7B model, 0.2 G parameters a layer, and one row of 1024 tokens.

    On the CPU a tiny one: there only the search itself can be tried.
    """
    if device == "cpu":
        return Size(replace(SIZES["tiny"].shape, layers=layers), 1)
    return Size(Shape(VOCABULARY, 1024, 4096, layers, 32), 1)


def ways(device: str, cap_bytes: int, policy: str) -> Mapping[str, Session]:
    """What can be tried on `device`: this package within the cap, and the peers at hand."""
    peers = {peer.name: peer.session for peer in PEERS if peer.missing(device) is None}
    return {"cotrain": partial(cotrain, cap_bytes, policy), **peers}


@contextlib.contextmanager
def cotrain(cap_bytes: int, policy: str, size: Size, device: str) -> Iterator[Step]:
    """A model left on the CPU, placed within the cap."""
    options: dict[str, Any] = {
        "policy": policy,
        "memory_budget": int((1 - FOR_LIBRARIES) * cap_bytes),
        "quiet": True,
    }
    if device == "cuda":
        options["device"] = "cuda"
    training = Training(size, device, built_on="cpu")
    yield torch.compile(training.step, backend="cotrain", options=options)


@contextlib.contextmanager
def capped(device: str, cap_bytes: int) -> Iterator[None]:
    """At most `cap_bytes` of the card for torch's allocator; nothing to cap on the CPU."""
    if device == "cpu":
        yield
        return
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / whole))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def runs(session: Session, size: Size, device: str) -> bool:
    """Whether two steps run, the second with all states there. Other errors are raised."""
    try:
        with session(size, device) as step:
            batch = size.batch(device)
            for _ in range(2):
                step(*batch)
            if device == "cuda":
                torch.cuda.synchronize()
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return True


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what it comes from, says that the memory does not do."""
    kinds = (torch.OutOfMemoryError, OutOfDeviceMemory, PlacementError)
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


def largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ascending `sizes` that fits, None where none does; smaller ones fit too."""
    count = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[count - 1] if count else None


def row(device: str, cap_bytes: int, session: Session, layers: Sequence[int]) -> dict[str, Any]:
    """The deepest model that `session` trains within the cap, and its parameters."""
    with capped(device, cap_bytes):
        found = largest(layers, lambda count: runs(session, deep(count, device), device))
    return {
        "cap_bytes": cap_bytes,
        "layers": found,
        "parameters": deep(found, device).parameters if found else 0,
        "tried": list(layers),
    }
