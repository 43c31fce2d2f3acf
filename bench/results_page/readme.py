"""The sentences of the README and of the pages of tasks that quote figures, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.plans.first_screen import Case
from bench.results_page.figure import Figure, Result
from bench.results_page.pages import peak_errors, percent, processor_ratios, time_errors

README, FINE_TUNE = "README.md", "docs/tasks/fine-tune-7b.md"
RENT = "docs/start/before-you-rent.md"


def _case(r: Result, model: str, machine: str) -> Case:
    """The plan of `model` on `machine`; it fits."""
    return next(
        case
        for case in (Case(**row) for row in r["cases"])
        if (case.model, case.machine) == (model, machine)
    )


def _gib(nbytes: int | None) -> str:
    return f"{(nbytes or 0) / 2**30:.1f}"


def _row(model: str, machine: str) -> Callable[[Result], Sequence[str]]:
    """A row of the first table: bytes of all, of the device and of the host, the step, its gap."""

    def values(r: Result) -> Sequence[str]:
        case = _case(r, model, machine)
        assert case.step_s is not None
        assert case.bound_s is not None
        needed = (case.resident_bytes, case.device_bytes, case.host_bytes)
        gap = percent(case.step_s / case.bound_s - 1)
        return *map(_gib, needed), f"{case.step_s:.2f}", f"{case.tokens_per_s:,.0f}", gap

    return values


def _fine_tune(r: Result) -> Sequence[str]:
    case = _case(r, "Llama 7B, 4 × 2048", "rtx4090")
    return (
        _gib(case.device_bytes),
        _gib(case.host_bytes),
        f"{case.step_s:.1f}",
        f"{case.tokens_per_s:,.0f}",
    )


def _of_published_steps(r: Result) -> Sequence[str]:
    """How far off predictions are that no step of the same family of models was fitted on."""
    off = r["off"]["a family left out"]
    return percent(off["median"]), str(off["within 20 %"]), str(off["rows"])


def _two_ranks(r: Result) -> Sequence[str]:
    """Planned steps beside eager ones."""
    seconds = r["median_s"]
    return [
        f"{seconds[f'{way}, planned'] / seconds[f'{way}, eager']:.2f}" for way in ("DDP", "FSDP2")
    ]


def _rival(system: str) -> Callable[[Result], Sequence[str]]:
    """What is published of a system's step, and what our model of its rule takes."""

    def values(r: Result) -> Sequence[str]:
        (found,) = (row for row in r["rivals"] if row["system"] == system)
        return f"{found['step_ms']:,.0f}", f"{found['predicted_ms']:,.0f}"

    return values


def _ranks(*ways: str) -> Callable[[Result], Sequence[str]]:
    """Milliseconds of a step on two ranks, in each way."""
    return lambda r: [f"{1e3 * r['median_s'][way]:.0f}" for way in ways]


def _row_with_drive(model: str) -> Callable[[Result], Sequence[str]]:
    """The same of a step that needs a drive: what rests there behind what the host has."""

    def values(r: Result) -> Sequence[str]:
        resident, device, host, *others = _row(model, "rtx4090")(r)
        return resident, device, host, _gib(_case(r, model, "rtx4090").disk_bytes), *others

    return values


WITH_DRIVE = "| {} GiB | {} GiB | {} GiB, and {} on disk | {} s | {} | {} % |"
NUMBERS = "| {} GiB | {} GiB | {} GiB | {} s | {} | {} % |"
ROWS = (
    ("GPT-2 124M, 32 × 1024", "rtx4090", "RTX 4090"),
    ("Llama 1B, 8 × 2048", "rtx4090", "RTX 4090"),
    ("Llama 7B, 4 × 2048", "rtx4090", "RTX 4090"),
    ("Llama 7B, 4 × 2048", "h100", "H100 80 GB"),
)


def _vocabulary(model: str) -> Callable[[Result], Sequence[str]]:
    """The least device memory and the step with a whole loss and in parts, and its gap."""

    def values(r: Result) -> Sequence[str]:
        row = next(row for row in r["rows"] if row["model"] == model)
        least = _gib(row["least_whole_bytes"]), _gib(row["least_bytes"])
        steps = f"{row['whole_s']:.2f}", f"{row['step_s']:.2f}"
        return *least, *steps, percent(row["step_s"] / row["bound_s"] - 1)

    return values


FIGURES = (
    *(
        Figure(README, f"| {model} | {card} {NUMBERS}", "first_screen", _row(model, machine))
        for model, machine, card in ROWS
    ),
    *(
        Figure(
            README,
            f"| {model} | RTX 4090 {WITH_DRIVE}",
            "first_screen_drive",
            _row_with_drive(model),
        )
        for model in ("Llama 7B, 4 × 2048", "Llama 13B, 2 × 2048")
    ),
    *(
        Figure(
            README,
            f"| {model} | {{}} → {{}} GiB | {{}} → {{}} s | {{}} % |",
            "vocabularies",
            _vocabulary(model),
        )
        for model in ("Llama-3.2-1B, 4 × 4096", "Qwen-like 3B, 4 × 2048", "Gemma-like 2B, 4 × 2048")
    ),
    Figure(
        README,
        "ZeRO-Offload's rule fits {} of the first 4 steps;",
        "first_screen",
        lambda r: [str(sum(row["zero_offload_s"] is not None for row in r["cases"]))],
    ),
    Figure(
        README,
        "a family of models left out, they are off by {} % in the median, and {} of {} steps lie "
        "within 20 %",
        "published_steps",
        _of_published_steps,
    ),
    Figure(
        README,
        "step times are off by {} % in the median and {} % at worst, peaks of device memory by at "
        "most {} bytes",
        "simulated_vs_measured",
        lambda r: (*time_errors(r), peak_errors(r)[0]),
    ),
    Figure(
        README,
        "on two ranks a step takes {} of eager `DistributedDataParallel`'s time, and {} of FSDP2's",
        "several_ranks",
        _two_ranks,
    ),
    Figure(
        README,
        "ZeRO-2 with offload on two ranks {} ms, planned {};",
        "several_ranks",
        _ranks("DeepSpeed ZeRO-2 with CPU offload, eager", "DDP, planned"),
    ),
    Figure(
        README,
        "`fully_shard` on two ranks {} ms, planned {};",
        "several_ranks",
        _ranks("FSDP2, eager", "FSDP2, planned"),
    ),
    *(
        Figure(
            README,
            f"a step published at {{}} ms takes {{}} by our model of it {end}",
            "rivals",
            _rival(s),
        )
        for s, end in (
            ("DeepSpeed ZeRO-Offload", "| years"),
            ("FSDP CPU offload, Llama 3.1 70B", "| runs"),
            ("torchao CPUOffloadOptimizer", "| takes"),
        )
    ),
    Figure(
        README,
        "{} to {} times the processor time of stock `torch.compile`;",
        "against_torch_compile_*_kept",
        processor_ratios,
    ),
    Figure(
        README,
        "{} to {} times where glibc gives freed memory back to the system",
        "against_torch_compile_*[!t]",
        processor_ratios,
    ),
    Figure(
        RENT,
        "{} % off in the median with the family of models left out, {} of {} within 20 %",
        "published_steps",
        _of_published_steps,
    ),
    Figure(
        FINE_TUNE,
        "With everything on the GPU that takes {} GiB.",
        "first_screen",
        lambda r: [_gib(_case(r, "Llama 7B, 4 × 2048", "rtx4090").resident_bytes)],
    ),
    Figure(
        FINE_TUNE,
        "within {} GiB of GPU memory and {} GiB of host memory: {} s a step, {} tokens/s",
        "first_screen",
        _fine_tune,
    ),
)
