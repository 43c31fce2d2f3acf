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
    name = compiler()
    assert name is not None
    version = importlib.metadata.version("torch")
    told = "\n".join((SOURCE.read_text(), HEADER.read_text(), version, name, *FLAGS))
    key = hashlib.sha256(told.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cotrain-tests"
    built = folder / f"fake_cuda-{key}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "building").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several test workers one compiles
            if not built.exists():
                _build(name, built)
    return built


def _build(name: str, target: Path) -> None:
    """Compile beside `target` and rename: a build that is cut short leaves nothing."""
    torch = torch_folder()
    include = [HEADER.parent, torch / "include", torch / "include/torch/csrc/api/include"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "guard.so"
        command = [name, *FLAGS, *(f"-I{path}" for path in include), str(SOURCE), "-o", str(made)]
        libraries = (f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu")
        run = subprocess.run([*command, *libraries], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]
        made.replace(target)
