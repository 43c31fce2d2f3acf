"""An absent card: torch, in this process, as it is beside a card that is not there.

Built from `absent_card.cpp` and its header by the C++ compiler of this machine, once for each
torch. For a process that traces a step and then ends: nothing is taken back
(`docs/decisions/0029-trace-for-a-card.md`).

Private torch API used: `torch.cuda._lazy_init`, `FakeTensorMode.avoid_device_init`,
`fake_tensor.init_gpu_context`, `proxy_tensor.unset_fake_temporarily`,
`torch._C._cuda_getCurrentRawStream`, `torch._C._conv_determine_backend_memory_format`. Reason: they
would start CUDA, which a torch that is built with it tries and fails, take memory of the card, or
are asked for by libraries; the last knows no cuDNN where there is no card. Tried on torch 2.13.0
for the CPU, and on 2.11.0 and 2.15.0 built with CUDA.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock
from uuid import uuid4

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from cotrain_compile import presets
from cotrain_compile.capture.offline.card_attention import (
    AttentionCall,
    Capability,
    kernel_of,
    usual_order,
)
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Machine
from cotrain_compile.presets.cards import CARDS, Card
from cotrain_compile.support.disk_cache import VARIABLE, is_only_ours, keep_at_most, private_folder
from cotrain_compile.support.phases import tell_phase

SOURCE = Path(__file__).with_name("absent_card.cpp")
HEADER = SOURCE.with_suffix(".h")
# What libraries that launch kernels take from torch when they are imported beside a card; a torch
# for the CPU has none.
_STREAM = "_cuda_getCurrentRawStream"
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC")
MOST_BYTES = 16 << 20  # of 30 KiB for each torch
ANY_CARD: Capability = (8, 0)

# Cards that no preset is of, by a word in their name (NVIDIA's list of CUDA GPUs).
_WITHOUT_PRESET: Mapping[str, Capability] = {
    "a30": (8, 0),
    "a10g": (8, 6),
    "l40": (8, 9),
    "h800": (9, 0),
    "b300": (10, 3),
    "gb300": (10, 3),
    **dict.fromkeys(("a1000", "a2000", "a4000", "a5000"), (8, 6)),
    **dict.fromkeys(("5060", "5070"), (12, 0)),
}


def _chip(card: Card) -> str:
    """Of the words of a card that which names its chip; of an RTX 6000, which several are, all."""
    numbers = [word for word in card.words.lower().split() if re.search("[0-9]", word)]
    return card.words.lower() if "6000" in numbers else numbers[0]


# By a word in the name or the source of a machine that says none itself, the compute capability of
# its card.
_CAPABILITIES = {**_WITHOUT_PRESET, **{_chip(card): card.chip for card in CARDS}}


def capability_of(text: str) -> Capability | None:
    """The compute capability of the card that a text names; None where it names none we know.

    A name may come behind letters ("rtx4090", "8xh100") and before a dash ("a100-80"), but not in
    the middle of a number: an RTX A1000 is no A100.
    """
    lower = text.lower()
    for word, found in _CAPABILITIES.items():
        before = "(?<![0-9])" if word[0].isdigit() else "(?:(?<![a-z0-9])|(?<=[0-9]x))"
        if re.search(rf"{before}{word}(?![a-z0-9])", lower):
            return found
    return None


def card_for(device: str | None, machine: str | Machine | None) -> tuple[Capability, int] | None:
    """Capability and bytes of the card to trace for; None where it is no card.

    A machine with a card that we know stands for one; `device` "cpu" is the emulated device on any.
    Raises `OptionError` for the machine of a card that says nothing by which kernels are chosen.
    """
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f"device {device!r}: a step is traced for 'cpu' or for 'cuda'")
    found = presets.find(machine) if isinstance(machine, str) else machine
    capability = _capability(found) if found else None
    if device != "cpu" and found and capability is None and found.runs_ahead:
        raise OptionError(
            f"machine {found.name!r} is one with a card, but does not say which: add "
            '"compute_capability": [8, 9], or that of the card, to its file beside "name", or '
            "calibrate it anew; device='cpu' traces the step as on a CPU"
        )
    if device == "cpu" or (device is None and capability is None):
        return None
    memory_bytes = found.device.capacity_bytes if found else 80 << 30
    return capability or ANY_CARD, memory_bytes


def _capability(machine: Machine) -> Capability | None:
    said = machine.compute_capability
    return said or capability_of(machine.name) or capability_of(machine.source)


@contextmanager
def absent_card(capability: Capability, memory_bytes: int) -> Iterator[None]:
    """Within it there is one CUDA device, which has no memory and runs nothing.

    Raises `OptionError` where there is no C++ compiler, or it fails.
    """
    library = _loaded()
    numbers = ctypes.POINTER(ctypes.c_int64)
    choose = ctypes.CFUNCTYPE(ctypes.c_int64, numbers, numbers)
    kernels = len(SDPBackend.__members__) - 1  # an error is none

    def chosen(facts: Any, order: Any) -> int:
        return int(
            kernel_of(
                AttentionCall(*facts[: len(fields(AttentionCall))]), capability, order[:kernels]
            )
        )

    _kept.append(callback := choose(chosen))
    usual = usual_order(capability)
    library.take_over_cuda(
        callback, (ctypes.c_int64 * len(usual))(*usual), ctypes.c_int64(len(usual))
    )
    with ExitStack() as stack:
        answers = _answers(capability, memory_bytes)
        stack.enter_context(mock.patch.multiple(torch.cuda, **answers))
        stack.enter_context(constants_on_the_host())
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(
            mock.patch.object(torch._C, "_conv_determine_backend_memory_format", _as_cudnn)
        )
        if not hasattr(torch._C, _STREAM):
            stack.enter_context(mock.patch.object(torch._C, _STREAM, _no_stream, create=True))
        _refuse_started_threads()
        yield


def _as_cudnn(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """How a convolution's result lies: channels last where what it reads, or its filters, do."""
    del backend
    found = (suggest_memory_format(tensor) for tensor in (x, weight))
    last = (torch.channels_last, torch.channels_last_3d)
    return next((lies for lies in found if lies in last), torch.contiguous_format)


@contextmanager
def constants_on_the_host() -> Iterator[None]:
    """Within it, a trace takes no memory of the card for `torch.tensor(..., device="cuda")`.

    With a card, a fake mode makes such a tensor real before it fakes it, and a trace keeps what it
    knows the values of, one number or none, beside it.
    """
    no_memory = property(lambda mode: True, lambda mode, value: None)

    @contextmanager
    def unset_on_the_host() -> Iterator[Any]:
        with unset_fake_temporarily() as mode, _OnTheHost():  # type: ignore[no-untyped-call]
            yield mode

    with (
        mock.patch.object(FakeTensorMode, "avoid_device_init", no_memory, create=True),
        mock.patch.object(proxy_tensor, "unset_fake_temporarily", unset_on_the_host),
    ):
        yield


class _OnTheHost(TorchDispatchMode):
    """What would be made on the card is made on the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        asked = dict(kwargs or {})
        if asked.get("device") is not None and torch.device(asked["device"]).type == "cuda":
            asked["device"] = torch.device("cpu")
        return func(*args, **asked)


def _no_stream(device: int) -> NoReturn:
    raise OptionError(
        "a library launches a kernel of its own on the card, and there is none here; trace without "
        "that call, give the library a custom op that it registers a fake for, or trace beside a "
        "card"
    )


def _refuse_started_threads() -> None:
    """Raise `OptionError` where autograd has counted the cards before there was one."""
    with FakeTensorMode():
        number = torch.ones((), device="cuda", requires_grad=True)
        try:
            (number * 2).backward()
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise OptionError(
                "this process has run a backward without a card, and torch counts cards only once: "
                "trace for a card before that, or with the command `cotrain-compile trace`"
            ) from None


_kept: list[Any] = []  # torch keeps the address of a callback


def _answers(capability: Capability, memory_bytes: int) -> dict[str, Any]:
    card = SimpleNamespace(
        name=f"a card of compute capability {capability[0]}.{capability[1]}",
        major=capability[0],
        minor=capability[1],
        total_memory=memory_bytes,
        multi_processor_count=100,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=101376,
        L2_cache_size=40 << 20,
        gcnArchName="",
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "_lazy_init": lambda: None,
        "get_device_properties": lambda *_: card,
        "get_device_name": lambda *_: card.name,
        "get_device_capability": lambda *_: capability,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }


def _loaded() -> ctypes.CDLL:
    """The library: the one that is kept, where only this user could have made it and it is whole.

    Else it is built, and kept where nobody else may write.
    """
    name = shutil.which(os.environ.get("CXX", "g++"))
    if name is None:
        raise OptionError(
            "tracing as on a card that is not there needs a C++ compiler: install g++, name one "
            "with the variable CXX, or trace on a machine with the card"
        )
    told = "\n".join((SOURCE.read_text(), HEADER.read_text(), torch.__version__, name, *FLAGS))
    key = hashlib.sha256(told.encode()).hexdigest()[:16]
    folder = private_folder("cards")
    kept = folder / f"absent_card-{key}.so" if folder else None
    if kept and is_only_ours(kept) and _is_whole(kept):
        with suppress(OptionError, OSError):  # built beside another C library: it is built again
            library = _opened(kept)
            kept.touch()  # what is used last stays
            return library
    with _aside(folder) as made:
        _compile(name, made)
        library = _opened(made)
        if made.parent == folder and kept:
            with suppress(OSError):
                _seal(made)
                made.replace(kept)  # another process may have built the same
                keep_at_most(folder, MOST_BYTES)
    return library


def _opened(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.take_over_cuda  # noqa: B018
    except (OSError, AttributeError) as error:
        raise OptionError(
            f"what stands for a card cannot be loaded ({error}); give a folder of yours from which "
            f"programs may be loaded, with the variable {VARIABLE} or TMPDIR, or another compiler "
            "with CXX"
        ) from None
    return library


@contextmanager
def _aside(folder: Path | None) -> Iterator[Path]:
    """Where to build: in `folder`, or where nothing can be kept in a folder that goes again."""
    if folder is None or not os.access(folder, os.W_OK | os.X_OK):
        with tempfile.TemporaryDirectory(prefix="cotrain-card-") as private:
            yield Path(private) / "made.so"
        return
    made = folder / f".{uuid4().hex}.tmp"  # where this is killed, `keep_at_most` deletes it
    try:
        yield made
    finally:
        made.unlink(missing_ok=True)


def _seal(library: Path) -> None:
    """Add the digest of its content, which loaders pass by: a half library may end the process.

    Nobody else may write to it, whatever the umask.
    """
    library.chmod(0o700)
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compile(name: str, made: Path) -> None:
    folder = Path(torch.__file__).parent
    tell_phase("compiling what stands for the card")
    include = (folder / "include", folder / "include/torch/csrc/api/include")
    command = [name, *FLAGS, *(f"-I{path}" for path in include), str(SOURCE), "-o", str(made)]
    libraries = (f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu")
    try:
        run = subprocess.run(
            [*command, *libraries], capture_output=True, text=True, errors="replace"
        )
    except OSError as error:  # it is no program
        wrong = error.strerror
    else:
        if not run.returncode:
            return
        lines = run.stderr.strip().splitlines()
        wrong = next((line for line in lines if "error" in line), "no message")
    raise OptionError(
        f"{name} cannot build what tracing as on a card needs: {wrong}; take another "
        "compiler with the variable CXX, or trace on a machine with the card"
    )
