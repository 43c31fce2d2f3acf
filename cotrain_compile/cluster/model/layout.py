"""Layout: how the ranks of a step are arranged: a mesh, and what each of its dimensions divides.

    pipeline    layers, in stages of consecutive ones (with a `StagePlan` beside it)
    replicate   samples; every rank has the same parameters, and sums gradients
    shard       samples; every rank has a part of parameters, gradients and states
    experts     samples, and the experts of each layer that has some, whose tokens are exchanged
    tensor      the products and the attention of each layer, for the same samples

Names of dimensions are those of a `DeviceMesh`, in this order: ranks that differ in `tensor` alone
are next to each other. What is no expert has its gradients summed over `experts` too. `replicate`
and `shard` together are HSDP. No torch.

Stage plan: how a pipeline runs, as a plan of the cluster or a user says it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cotrain_compile.errors import OptionError

FORMAT_VERSION = 1
# The dimensions of a mesh, the one with the slowest links first.
DIMENSIONS = ("pipeline", "replicate", "shard", "experts", "tensor")
# Those along which ranks work on different samples.
OF_SAMPLES = ("replicate", "shard", "experts")


@dataclass(frozen=True)
class Layout:
    """Sizes of all dimensions of the mesh, and how a rank runs its samples.

    With `sequence`, what is between divided products is divided too, by tokens (Megatron's sequence
    parallelism). With `gathered_again`, what a shard gathers for a forward is gathered once more
    for its backward (`reshard_after_forward`). A rank runs `micro_batches` of `micro_batch`
    samples; where ranks have unequal shares, `samples` says how many each of them has, in the order
    of `replica`, and gradients are their mean over all samples. With `recompute` layers run again
    for the backward.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    experts: int = 1
    tensor: int = 1
    sequence: bool = False
    gathered_again: bool = True
    recompute: bool = False
    micro_batches: int = 1
    micro_batch: int = 1
    samples: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        batches = {"micro_batches": self.micro_batches, "micro_batch": self.micro_batch}
        sizes = self.sizes | batches
        wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1]
        if wrong:
            raise OptionError(f"a layout has sizes of 1 and more, not {', '.join(wrong)}")
        if self.sequence and self.tensor == 1:
            raise OptionError("sequence=True divides by tokens what `tensor` divides; take more")
        if self.samples and (len(self.samples) != self.replicas or min(self.samples) < 1):
            raise OptionError(
                f"{self.replicas} ranks have samples of their own, one or more each, not "
                f"{self.samples}"
            )

    @property
    def devices(self) -> int:
        """How many ranks there are."""
        return prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension of the mesh, in its order."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def mesh(self) -> dict[str, int]:
        """The dimensions that divide anything; that of a single rank is empty."""
        return {name: size for name, size in self.sizes.items() if size > 1}

    @property
    def replicas(self) -> int:
        """How many ranks, or groups of `pipeline` x `tensor` ranks, have samples of their own."""
        return prod(getattr(self, name) for name in OF_SAMPLES)

    @property
    def step_samples(self) -> int:
        """The samples of a step, over all ranks."""
        return sum(self.samples) or self.replicas * self.micro_batches * self.micro_batch

    @property
    def not_executed(self) -> str:
        """What of it `cotrain_compile.scale` does not run yet, in words; "" where it runs all."""
        if self.experts > 1 and self.samples:
            return "experts with unequal samples"
        unequal = self.pipeline > 1 and self.samples
        return "replicas of a pipeline with unequal samples" if unequal else ""

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank in each dimension."""
        if not 0 <= rank < self.devices:
            raise OptionError(f"a layout of {self.devices} ranks has no rank {rank}")
        found = {}
        for name, size in reversed(self.sizes.items()):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in DIMENSIONS}

    def replica(self, rank: int) -> int:
        """Which of the `replicas` a rank belongs to."""
        at, number = self.coordinates(rank), 0
        for name in OF_SAMPLES:
            number = number * self.sizes[name] + at[name]
        return number

    def __str__(self) -> str:
        """Its dimensions: `pipeline 2 x shard 8`."""
        parts = [f"{name} {size}" for name, size in self.mesh.items()]
        return " x ".join(parts) or "one device"


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
