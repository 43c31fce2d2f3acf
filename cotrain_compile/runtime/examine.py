"""Examine: what this computer can do for a step, what will be used of it, and what to change.

In: the computer, its torch and the environment. Out: findings in words. Nothing is measured or kept
and no memory is taken; a card's driver is asked, which starts CUDA.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from cotrain_compile.machine import default_budget
from cotrain_compile.runtime.cuda.pinned import available_host_bytes
from cotrain_compile.runtime.cuda.setup import machine_like
from cotrain_compile.runtime.process.cores import (
    Cores,
    as_ranges,
    cores_beside,
    memory_nodes,
    node_of_card,
    usable_cores,
)
from cotrain_compile.support import limits
from cotrain_compile.support.disk_cache import VARIABLE, folder_of
from cotrain_compile.support.units import format_bytes

PACKAGE = "cotrain-compile"
LOW_DISK_BYTES = 2**30
# A driver of NVIDIA's says its version here, also where this torch has no CUDA.
DRIVER = Path("/proc/driver/nvidia/version")

# What `frameworks` brings; the versions that are tested are in `pyproject.toml`.
FRAMEWORKS = ("transformers", "accelerate", "pytorch-lightning", "lightning-fabric", "peft")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what is there, what is used of it, and what to change.

    `change` is "" where nothing is to be changed; where what was found `prevents` that a step runs,
    it has to be changed.
    """

    topic: str
    found: str
    used: str = ""
    change: str = ""
    prevents: bool = False


def examine() -> Iterator[Finding]:
    """All findings, in the order in which a first step needs what they are about."""
    yield _versions()
    yield _system()
    yield from _cards()
    yield _host_memory()
    yield _pinned_memory()
    yield _cores()
    yield _compiler()
    yield _cache()
    yield _frameworks()


def _versions() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    wanted = _wanted_of_torch()
    is_wanted = all(_holds(one) for one in wanted)
    return Finding(
        "versions",
        f"{PACKAGE} {metadata.version(PACKAGE)}, torch {torch.__version__} ({build})",
        change="" if is_wanted else f"install torch {', '.join(wanted)}",
        prevents=not is_wanted,
    )


def _wanted_of_torch() -> list[str]:
    """The versions that the package was installed for: ">=2.11" and "<2.16"."""
    needed = metadata.requires(PACKAGE) or []
    of_torch = next((one for one in needed if re.match(r"torch\b", one)), "torch")
    return re.findall(r"(?:>=|<)[\d.]+", of_torch)


def _holds(bound: str) -> bool:
    least = bound.startswith(">=")
    version, limit = (
        tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (torch.__version__, bound)
    )
    return (version >= limit) is least


def _system() -> Finding:
    is_linux = platform.system() == "Linux"
    return Finding(
        "system",
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}, "
        f"{platform.machine()}, glibc {platform.libc_ver()[1] or 'not found'}",
        change="" if is_linux else "it needs Linux",
        prevents=not is_linux,
    )


def _cards() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield _no_card()
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        machine = machine_like(properties)
        budget_bytes = default_budget.of_what_is_free(free, total)
        yield Finding(
            f"card {index}",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{format_bytes(free)} of {format_bytes(total)} free, "
            f"driver {_driver() or 'not found'}, cuDNN {_cudnn()}"
            + _place(node_of_card(properties)),
            used=f"{format_bytes(max(0, budget_bytes))} as the budget where none is set; "
            f"{machine.source}{_beside(cores_beside(properties))}",
            change="" if free > total / 2 else "another process has half of its memory or more",
        )


def _place(node: int | None) -> str:
    several = len(memory_nodes()) > 1
    return "" if not several else ", on no known node" if node is None else f", on node {node}"


def _beside(cores: Cores) -> str:
    if not cores.numbers:
        return ""
    return (
        f"; pinned memory and updates on the host keep to cores {as_ranges(cores.numbers)} on its "
        f"node, with {cores.threads} threads, where host_cores names no others"
    )


def _no_card() -> Finding:
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    change = ""
    if has_device and torch.version.cuda is None:
        change = "there is a card, but this torch has no CUDA: install one of its CUDA builds"
    elif has_device:
        change = (
            "there is a card, but torch finds none: look at nvidia-smi and its driver's version"
        )
    driver = _driver()
    return Finding(
        "card",
        f"none that torch finds{driver and f', driver {driver}'}",
        used="the emulated device, in this computer's memory; for plans, --machine names a card",
        change=change,
    )


def _driver() -> str:
    """Its version, or "" where there is none."""
    told = DRIVER.read_text() if DRIVER.is_file() else ""
    found = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", told)
    return found[1] if found else ""


def _cudnn() -> str:
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return "not found" if version is None else str(version)


def _host_memory() -> Finding:
    installed, usable = limits.installed_memory_bytes(), limits.usable_memory_bytes()
    available = max(0, available_host_bytes())
    within = "" if usable == installed else f", a cgroup allows {format_bytes(usable)}"
    return Finding(
        "host memory",
        f"{format_bytes(installed)}{within}",
        used=f"{format_bytes(available)} as the host's budget where none is set",
        change=""
        if 2 * available > usable
        else "more than half of it is taken: end what else runs, or set host_memory_budget",
    )


def _pinned_memory() -> Finding:
    limit, usable = limits.locked_memory_limit_bytes(), limits.usable_memory_bytes()
    found = "no limit" if limit is None else f"a limit of {format_bytes(limit)} (ulimit -l)"
    has_card = torch.cuda.is_available()
    change = ""
    if has_card and limit is not None and limit < usable:
        change = (
            "a driver may refuse to pin more: where a step says so, ulimit -l unlimited, or "
            "--ulimit memlock=-1 of a container"
        )
    used = "as much as a plan keeps on the host, within its budget" if has_card else "no card: none"
    return Finding("pinned memory", found, used=used, change=change)


def _cores() -> Finding:
    cores, allowed = usable_cores(), limits.cgroup_cores()
    nodes = memory_nodes()
    told = f"{len(cores)} cores"
    told += f", of which a cgroup allows {allowed:g}" if allowed is not None else ""
    if len(nodes) > 1:
        of_each = "; ".join(f"node {node}: {as_ranges(own)}" for node, own in nodes.items())
        told += f", on {len(nodes)} memory nodes (NUMA; {of_each})"
    threads = torch.get_num_threads()
    most = min(len(cores), allowed or len(cores))
    change = ""
    if threads > most:
        change = f"torch uses {threads} threads: OMP_NUM_THREADS={int(most) or 1} before the start"
    return Finding("cores", told, used=f"{threads} threads of torch", change=change)


def _compiler() -> Finding:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    return Finding(
        "C++ compiler",
        path or f"{name} is not there",
        used='compiles what runs on the CPU (lowering="inductor") and stands for a card offline',
        change="" if path else "install g++, or name a compiler by the variable CXX",
    )


def _cache() -> Finding:
    folder = folder_of("plans")
    if folder is None:
        return Finding(
            "cache",
            f"{VARIABLE} is empty",
            used="nothing is kept: every process plans and measures anew",
        )
    root = folder.parent
    there = next(one for one in (root, *root.parents) if one.exists())
    free = shutil.disk_usage(there).free
    change = ""
    if not os.access(there, os.W_OK):
        change = f"{there} cannot be written: name another folder by {VARIABLE}"
    elif free < LOW_DISK_BYTES:
        change = f"little room: free some, or name another folder by {VARIABLE}"
    return Finding(
        "cache", f"{root}, {format_bytes(free)} free", used="plans, rates", change=change
    )


def _frameworks() -> Finding:
    found = []
    for name in FRAMEWORKS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return Finding("frameworks", ", ".join(found) or "none installed")
