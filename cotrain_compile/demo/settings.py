"""Settings: what a user may choose of the demo; the rest is the size of the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotrain_compile import presets
from cotrain_compile.demo.model import Shape
from cotrain_compile.errors import OptionError
from cotrain_compile.options import Options

# Steps whose ops are measured before the step is planned with their times; the first is left out.
MEASURED_STEPS = 8


@dataclass(frozen=True)
class Settings:
    """`machine` is a preset or a file, "" for this computer, which is then measured.

    Raises `OptionError` where there are too few `steps` to measure some and to judge by others.
    """

    steps: int = 40
    output: Path = Path("demo-output")
    budget: str = "32MiB"
    machine: str = ""
    resume: bool = False
    shape: Shape = field(default_factory=lambda: Shape(width=256, layers=4, heads=4))
    rows: int = 8
    seed: int = 0
    measured_steps: int = MEASURED_STEPS

    def __post_init__(self) -> None:
        if self.steps < self.least_steps:
            raise OptionError(
                f"--steps is {self.steps}, but must be at least {self.least_steps}: the first "
                f"{self.measured_steps} are measured, for a plan that the others run by"
            )

    @property
    def least_steps(self) -> int:
        """Those that are measured, one that holds the tracing, and one to judge by."""
        return self.measured_steps + 2

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoint.pt"

    def budget_bytes(self, machine: Path | str) -> int:
        """What `budget` is on `machine`."""
        parsed = Options.parse({"memory_budget": self.budget}).memory_budget
        assert parsed is not None
        return parsed.of(presets.find(str(machine)).device.capacity_bytes)

    def options(self, machine: Path | str, **more: Any) -> dict[str, Any]:
        """What the step is compiled with."""
        return {
            "memory_budget": self.budget,
            "machine": str(machine),
            "throttle": True,
            "poison": False,
            "quiet": True,
            **more,
        }
