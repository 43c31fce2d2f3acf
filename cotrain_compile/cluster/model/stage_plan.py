"""Stage plan: how a pipeline runs, as a plan of the cluster or a user says it."""

from __future__ import annotations

from dataclasses import dataclass

from cotrain_compile.errors import OptionError

FORMAT_VERSION = 1
# Schedules in which a stage runs all of its micro-batches before another one comes.
BACK_TO_BACK = ("gpipe", "loopedbfs")


@dataclass(frozen=True)
class StagePlan:
    """A stage begins at each of the modules `split_points`, after the first stage.

    `schedule` is a name of `torch.distributed.pipelining`, in any case. A step has `micro_batches`
    of `micro_batch` samples. `peak_bytes` has what each stage takes, where a plan knows that. With
    `swapped`, Harmony's pipeline, all parameters rest on the host, and those of a stage come to the
    device as a whole for all micro-batches that it runs back to back; with `ahead` as well, those
    of the next stage come beside it, and gradients of the one before go home.
    """

    schedule: str
    split_points: tuple[str, ...]
    micro_batches: int
    micro_batch: int
    peak_bytes: tuple[int, ...] = ()
    swapped: bool = False
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.ahead and not (self.swapped and self.schedule.lower() in BACK_TO_BACK):
            raise OptionError(
                "ahead=True is for stages that are swapped and run all micro-batches back to back; "
                f"take swapped=True and LoopedBFS (or GPipe), not {self.schedule}"
            )
        if self.micro_batches < 1 or self.micro_batch < 1:
            raise OptionError(
                f"a step has at least one micro-batch of one sample, not {self.micro_batches} of "
                f"{self.micro_batch}"
            )

    @property
    def samples(self) -> int:
        """The samples of a step."""
        return self.micro_batches * self.micro_batch

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.split_points) + 1
