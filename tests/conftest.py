"""What every test can use: golden files, hypothesis profiles, a skip of `gpu` tests without CUDA.

Torch is imported only when a `gpu` test is about to run: the unit tests need none.
"""

from __future__ import annotations

import difflib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

GOLDEN_DIR = Path(__file__).parent / "golden"
WRITTEN = pytest.StashKey[list[str]]()
# Files that run the steps of `captured_steps`: in one worker each of them is captured once.
OF_CAPTURED_STEPS = {
    *(f"backends/test_{name}" for name in ("settle", "segments_of_steps", "inductor")),
    *(f"passes/test_{name}" for name in ("races", "rewrite", "recompute_values")),
    *(f"runtime/test_{name}" for name in ("modes", "cuda_runtime", "pieces", "watchdog")),
    *("overlap/test_overlap", "robustness/test_after_faults", "robustness/test_faults"),
}

# "ci" tries the same examples on every machine; `--hypothesis-profile=long` draws many new ones.
settings.register_profile("ci", max_examples=40, derandomize=True, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile("ci")


@functools.cache
def why_no_cuda() -> str | None:
    """The reason to skip a `gpu` test here; None where there is a CUDA device."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"needs a CUDA device, and torch {torch.__version__} is built without CUDA"
    return "needs a CUDA device, and torch sees none"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_cuda()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def no_unsound_plan_was_found() -> Iterator[None]:
    """Fails a test in which the search finds a plan that the check refuses, whatever it returns."""
    yield
    module = sys.modules.get("cotrain_compile.placement.search.found")
    unsound = [*module.UNSOUND] if module else []
    if module:
        module.UNSOUND.clear()
    assert not unsound, f"the search has found unsound plans: {unsound[:3]}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the tests produce to tests/golden instead of comparing",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: no garbage is sought in it, now or by any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden") and os.environ.get("CI"):
        raise pytest.UsageError(
            "--update-golden writes what it should compare, so CI refuses it: renew the texts on "
            "your own machine, and commit them with the change that they show"
        )
    # Workers share the cores, as do the processes that they start; torch reads it when it loads.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    # Threads that spin while they wait for one another take the cores from the other workers.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Inductor would ask the compiler, for 8 s, for each set of instructions that the processor has.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    config.stash[WRITTEN] = []
    os.environ["COTRAIN_CACHE_DIR"] = ""  # a plan of another run would hide what finds it
    # A shell lets what it puts into the background ignore Ctrl-C, which tests press.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name in config.stash[WRITTEN]:
        terminalreporter.write_line(f"wrote tests/golden/{name}")


def compare_golden(path: Path, text: str) -> None:
    """Fail, with a diff and how to go on, unless `path` holds exactly `text`."""
    go_on = "if the new text is right, run this test with --update-golden and review the diff"
    if not path.exists():
        pytest.fail(f"no golden file {path}; {go_on}", pytrace=False)
    expected = path.read_text(encoding="utf-8")
    if text != expected:
        diff = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), str(path), "this run", lineterm=""
        )
        pytest.fail("\n".join([*diff, "", f"{path.name} differs; {go_on}"]), pytrace=False)


def update_golden(path: Path, text: str) -> bool:
    """Make `path` hold `text`; True if it had to be written."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but that files of captured steps count as one, and those of ranks too.

    In the order of collection: what is dear comes first, and many short files of unit tests last.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class BySteps(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            name = file.removeprefix("tests/graph/").removesuffix(".py")
            if name.startswith("distribute/"):
                return "ranks"  # started once
            return "captured steps" if name in OF_CAPTURED_STEPS else file

    config.option.loadscopereorder = False
    return BySteps(config, log)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` is what tests/golden/`name` holds."""

    def check(name: str, text: str) -> None:
        path = GOLDEN_DIR / name
        if not request.config.getoption("--update-golden"):
            compare_golden(path, text)
        elif update_golden(path, text):
            request.config.stash[WRITTEN].append(name)

    return check
