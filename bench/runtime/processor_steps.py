"""Steps on this processor: is a calibration better than a guess, and by how much is it off?

    OMP_NUM_THREADS=1 python -m bench.runtime.processor_steps -o bench/results/processor_steps.json

A zoo of steps, from 4 milliseconds to half a second, with everything on the emulated device and no
link. Predicted is what the rates of a calibration say, of the guess that stands where nothing was
measured, and of the calibration with a small op's kernel alone as what an op takes at the least.
Rates and steps are both measured by the time of the one processor that the process has, which
other programs' work does not add to; of each step and rate the least counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cotrain_compile
from bench.report import write_report
from bench.results_page.tables import processor_steps
from bench.runtime.simulated_vs_measured import Build, char_gpt, llama, mlp, step_of
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.files import save
from cotrain_compile.machine import Machine, TierSpec
from cotrain_compile.presets import this_machine
from cotrain_compile.runtime.calibrate.calibrate import measured_tier
from cotrain_compile.runtime.calibrate.link_bench import CpuBench, Sizes

SIZES = Sizes(matmul_side=1024, repeats=7)
WARM_UP, REPEATS = 3, 15
_SMALL_KERNEL_S = 1e-6


class ProcessorBench(CpuBench):
    """The emulated device by the processor's time."""

    def seconds(self, work: Callable[[], object]) -> float:
        return processor_s(work)


def processor_s(work: Callable[[], object]) -> float:
    """Of this process in `work`."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def narrow() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Six layers of 128 x 128: hundreds of ops that compute next to nothing."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(6)])
    loss = _loss(model, F.mse_loss)
    return step_of(loss, model), (torch.randn(32, 128), torch.randn(32, 128))


def images() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A small network of images with batch norms."""
    parts: list[nn.Module] = []
    for channels, more, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1)):
        convolution = nn.Conv2d(channels, more, 3, stride=stride, padding=1)
        parts += [convolution, nn.BatchNorm2d(more), nn.ReLU()]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    loss = _loss(model, F.cross_entropy)
    return step_of(loss, model), (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))


def bert() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Three narrow layers of BERT, with dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=512,
        num_hidden_layers=3,
        vocab_size=1000,
    )
    model: Any = BertForSequenceClassification(config)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=x).logits, y)

    return step_of(loss, model), (torch.randint(0, 1000, (8, 64)), torch.randint(0, 2, (8,)))


def _loss(model: nn.Module, compare: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: compare(model(x), y)


ZOO: Mapping[str, Build] = {
    "narrow MLP": narrow,
    "MLP": mlp,
    "images": images,
    "BERT": bert,
    "character GPT": char_gpt,
    "Llama": llama,
}


def machines() -> dict[str, Machine]:
    """By what a step is predicted by."""
    guess = this_machine()
    memory_bytes = guess.device.capacity_bytes
    tier = measured_tier(ProcessorBench(memory_bytes), torch.device("cpu"), memory_bytes, SIZES)
    known: dict[str, TierSpec] = {
        "calibration": tier,
        "calibration, kernels alone": replace(tier, launch_s=_SMALL_KERNEL_S),
        "guess": guess.device,
    }
    return {name: guess.but(device=device) for name, device in known.items()}


def measured(build: Build, machine: Path) -> tuple[float, Any]:
    """Seconds of a step, and the step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    step, arguments = build()
    options: dict[str, Any] = {
        "machine": str(machine),
        "policy": "resident",
        "poison": False,
        "quiet": True,
    }
    run = torch.compile(step, backend="cotrain", options={**options, "lowering": "eager"})
    for _ in range(WARM_UP):
        run(*arguments)
    least_s = min(processor_s(lambda: run(*arguments)) for _ in range(REPEATS))
    return least_s, cotrain_compile.inspect(run).problem.dataflow


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    known = machines()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        save(known["guess"], path)
        for name, build in ZOO.items():
            seconds, dataflow = measured(build, path)
            predicted = {
                way: sum(roofline(dataflow, machine).device_s.values()) / seconds
                for way, machine in known.items()
            }
            rows.append({"step": name, "measured_ms": 1e3 * seconds, **predicted})
            print(rows[-1], flush=True)
    off = {way: statistics.median(abs(row[way] - 1) for row in rows) for way in known}
    result = {"steps": rows, "off, median": off}
    print(processor_steps(result))
    if output:
        write_report(output, "Is a calibration better than a guess on its own steps?", result)


if __name__ == "__main__":
    main()
