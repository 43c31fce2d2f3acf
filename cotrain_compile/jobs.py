"""Jobs: a user's file that builds a training step, named as `FILE.py:FUNCTION`.

Beside them, what may be asked of a job that `config_job` makes from a configuration.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from cotrain_compile.errors import OptionError

OptimizerName = Literal["adamw", "adam", "sgd", "adafactor"]
Precision = Literal["bf16-mixed", "bf16", "fp32"]


def is_file_job(job: str) -> bool:
    """Whether `job` is meant as `FILE.py:FUNCTION`, and not as a configuration."""
    return ".py" in Path(job).name


def load_job(job: str) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The function that a job names. Its file is executed, because the user asked for it.

    It may import its neighbours, as a script can. Called without arguments, it must return the step
    function and a tuple of example arguments. Raises `OptionError` when there is no such file or
    function.
    """
    file, colon, name = job.rpartition(":")
    path = Path(file)
    if not colon or not name or not path.is_file():
        raise OptionError(f"job {job!r}: name an existing file and a function, as job.py:build")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"job {job!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    build = getattr(module, name, None)
    if not callable(build):
        raise OptionError(f"job {job!r}: {path} has no function {name!r}")
    return lambda: _checked(build(), job)


def _checked(built: object, job: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if isinstance(built, tuple) and len(built) == 2:
        step, arguments = built
        if callable(step) and isinstance(arguments, tuple):
            return step, arguments
    raise OptionError(f"job {job!r} must return (step, arguments), a function and a tuple")
