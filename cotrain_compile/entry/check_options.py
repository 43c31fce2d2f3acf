"""Check options: what a user passed to `torch.compile`, with the files it names, becomes `Options`.

It runs when `torch.compile` is called, before anything is traced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cotrain_compile import presets
from cotrain_compile.capture.dynamo.compute_device import chosen_device
from cotrain_compile.cluster.model.strategy import Answer
from cotrain_compile.entry.planner import profile_of
from cotrain_compile.errors import OptionError
from cotrain_compile.files import kind_of, load
from cotrain_compile.options import Options, as_option_error
from cotrain_compile.placement.saved import load_plan


def check_options(options: Mapping[str, Any]) -> Options:
    """`options` parsed, where they are right and the device and files they name are there.

    Raises `OptionError` naming the option, and `FormatError` where a file is not what it should be.
    """
    parsed = Options.parse(options)
    chosen_device(parsed.device)
    with as_option_error("machine", parsed.machine):
        presets.find(parsed.machine)
    if parsed.disk is not None and not os.path.isdir(parsed.disk):
        raise OptionError(f"option 'disk' is {parsed.disk!r}, but must be a folder that is there")
    if parsed.plan is not None:
        with as_option_error("plan", parsed.plan):
            _refuse_plan_of_ranks(parsed.plan)
            load_plan(parsed.plan)
    profile_of(parsed)
    return parsed


def _refuse_plan_of_ranks(path: str) -> None:
    """Raise `OptionError` where a plan says how ranks train, which a step alone does not know."""
    match kind_of(path):
        case "answer":
            best = load(path, Answer).best
            told = (
                "it has none that fits" if best is None else f"its best is {best.name}: {best.run}"
            )
            raise OptionError(
                f"plan {path} is an answer of `cotrain-compile cluster`: it says how the model is "
                f"spread over ranks, and each rank plans its step itself. Leave the option plan "
                f"out, and spread the model so; {told}"
            )
        case "stageplan":
            raise OptionError(
                f"plan {path} has the stages of a pipeline: give it and the model to "
                "cotrain_compile.pipeline, and leave the option plan out"
            )
