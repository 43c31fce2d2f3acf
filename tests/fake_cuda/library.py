"""The shared library of `guard.cpp`: built once for a source and a torch, then found in a cache.

No torch is imported here: the library is to be loaded before it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
HEADER = Path(__file__).parents[2] / "cotrain_compile" / "capture" / "offline" / "absent_card.h"
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC")


def compiler() -> str | None:
    """The C++ compiler of this machine; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def torch_folder() -> Path:
    """Where torch is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def library() -> Path:
    """The library, compiled if this source has not been yet for this torch."""
    sources = [SOURCE.read_text(), HEADER.read_text(), *FLAGS]
    return built("fake_cuda.so", sources, _build)


def built(name: str, told: Sequence[str], build: Callable[[Path], None]) -> Path:
    """What `build(target)` makes for this torch and compiler of all in `told`, made but once."""
    found = compiler()
    assert found is not None
    version = importlib.metadata.version("torch")
    key = hashlib.sha256("\n".join((*told, version, found)).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cotrain-tests" / key
    made = folder / name
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "building").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several test workers one compiles
            if not made.exists():
                build(made)
    return made


def compile_to(target: Path, sources: Sequence[Path], *flags: str) -> None:
    """Compile beside `target` and rename: a build that is cut short leaves nothing."""
    found = compiler()
    assert found is not None
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [found, *FLAGS, *map(str, sources), "-o", str(made), *flags]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]
        made.replace(target)


def torch_flags(*libraries: str) -> list[str]:
    """What a source that includes torch's headers is compiled with, and linked to."""
    torch = torch_folder()
    include = [torch / "include", torch / "include/torch/csrc/api/include"]
    linked = [f"-l{name}" for name in ("c10", "torch_cpu", *libraries)]
    return [*(f"-I{path}" for path in include), f"-L{torch / 'lib'}", *linked]


def _build(target: Path) -> None:
    compile_to(target, [SOURCE], f"-I{HEADER.parent}", *torch_flags())
