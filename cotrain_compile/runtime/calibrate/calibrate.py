"""Calibrate: measure this computer and say what could not be measured.

In: a device ("cpu": the emulated one, whose link is a memory copy on another thread; "cuda"). Out:
a `Calibration`: a `Machine` with achieved rates, and remarks in words about what was left out and
about settings that slow offloading down. Every figure is the best of a few repeats, since whatever
else a computer does only slows one down; `Sizes` say how many, and until when. What no computer can
have is left as it is assumed, with a remark.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from cotrain_compile import presets
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import HostUpdate, Machine, Rates, Tier, TierSpec, two_tier
from cotrain_compile.runtime.calibrate.busy import busy_remark, share_of_cores
from cotrain_compile.runtime.calibrate.environment import (
    Environment,
    environment_remarks,
    read_environment,
)
from cotrain_compile.runtime.calibrate.link_bench import (
    Bench,
    CpuBench,
    CudaBench,
    Sizes,
    wall_s,
)
from cotrain_compile.runtime.calibrate.network_bench import (
    measured_network,
    network_remark,
    ranks_here,
)
from cotrain_compile.runtime.calibrate.op_constants import constants_of
from cotrain_compile.runtime.calibrate.op_factors import (
    factors_of,
    name_of,
    product_flops_per_s,
)
from cotrain_compile.runtime.calibrate.op_rates import (
    elements_per_s,
    free_a_large_result,
    fresh_bytes_per_s,
    least_op_s,
)
from cotrain_compile.runtime.cuda.card import CudaCard
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.setup import pool
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.ops import Launch

Progress = Callable[[str, float], None]

_DTYPES = (torch.float32, torch.bfloat16)
_HOST_DTYPES = (*_DTYPES, torch.float64)
# The host computes nothing in half precision, and would take very long to.
_CARD_DTYPES = (*_DTYPES, torch.float16)
# A matmul of the host's size takes a card microseconds, most of them to begin and to end.
_LARGER_ON_A_CARD = 4
_CALLS_PER_LAUNCH_SAMPLE = 100
_FIRST_ISSUES, _FEWEST_ISSUES = 3, 20
_ISSUE_PARTS = 4
# No interpreter takes longer for a task, and no copy takes more than that of a memory's rate from
# an update: what is beyond was measured while others had the cores.
_MOST_ISSUE_S, _MOST_SLOWDOWN = 1e-3, 4.0
# The parameter, its gradient and two moments in float32.
_BYTES_HELD_PER_PARAMETER = 16
# What another number of threads has to be worth to be told.
_FASTER = 1.2
# Of the rate of half as many parameters; less shows that a cache had helped.
_STAYS = 0.9


@dataclass(frozen=True)
class Calibration:
    """A measured machine; bytes per second of a host update by thread count; what to know.

    `share` of its cores is what the process got meanwhile.
    """

    machine: Machine
    host_update_bytes_per_s: Mapping[int, float]
    remarks: tuple[str, ...]
    share: float = 1.0


def calibrate(
    progress: Progress | None = None, device: str = "cpu", sizes: Sizes | None = None
) -> Calibration:
    """Measure this computer; `progress` hears what comes next and the fraction done.

    Where a process group is initialised every rank has to call it: each is measured while the
    others are, has its share of the computer's memory, and a network to them.

    Raises:
        OptionError: `device` is neither "cpu" nor a CUDA device that is there.
    """
    sizes = sizes or Sizes()
    environment, share = read_environment().shared_by(ranks_here()), share_of_cores()
    bench = _bench(device, environment)
    tell = progress or (lambda what, fraction: None)

    tell("copies in both directions", 0.0)
    copies = bench.copies(sizes)
    tell("matmul, memory and launches on the device", 0.3)
    on_device = torch.device(device)
    rates = measured_tier(bench, on_device, bench.capacity_bytes, sizes)
    device_tier, doubts = with_constants(bench, rates, on_device, sizes)
    tell("matmul, memory and launches on the host", 0.6)
    host_tier = device_tier if device == "cpu" else _host_tier(environment, sizes)
    tell("host updates", 0.7)
    update, by_threads, slowdown_remark = _host_update(bench, environment, sizes)
    tell("tasks", 0.9)
    task_s, task_remark = _believed(
        "s take Python's calls for a task",
        issue_s(_device_for(bench), sizes.until_s),
        most=_MOST_ISSUE_S,
        assumed=presets.ISSUE_S,
    )
    share = min(share, share_of_cores())
    tell("exchanges with other ranks", 0.97)
    network = measured_network(bench, on_device, sizes)
    tell("done", 1.0)

    machine = two_tier(
        name=f"{presets.THIS_MACHINE} (calibrated)",
        device=device_tier,
        host=host_tier,
        h2d=copies.h2d,
        d2h=copies.d2h,
        host_update=update,
        duplex=copies.duplex,
        source=_source(bench, environment),
        issue_s=task_s,
        fuses_updates=device != "cpu",  # what runs on a card is compiled
        runs_ahead=device != "cpu",
        rates=Rates.MEASURED,
    ).but(network=network, compute_capability=_capability(on_device))
    remarks = (
        *environment_remarks(environment),
        busy_remark(share),
        *doubts,
        slowdown_remark,
        task_remark,
        copies.remark,
        _threads_remark(by_threads),
        network_remark(network),
    )
    return Calibration(machine, by_threads, tuple(filter(None, remarks)), share)


def _source(bench: Bench, environment: Environment) -> str:
    cores, nodes = environment.usable_cores, environment.numa_nodes
    return (
        f"calibrate on {bench.name}, torch {torch.__version__}, {cores} cores, {nodes} NUMA node(s)"
    )


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _host_tier(environment: Environment, sizes: Sizes) -> TierSpec:
    memory_bytes = environment.usable_memory_bytes
    return measured_tier(CpuBench(memory_bytes), torch.device("cpu"), memory_bytes, sizes)


def _bench(device: str, environment: Environment) -> Bench:
    if device == "cpu":
        return CpuBench(environment.usable_memory_bytes)
    if device.split(":")[0] == "cuda" and environment.cuda:
        return CudaBench(torch.device(device))
    raise OptionError(
        f"cannot calibrate device {device!r}; use 'cpu', or 'cuda' where there is one"
    )


def measured_tier(
    bench: Bench, device: torch.device, capacity_bytes: int, sizes: Sizes
) -> TierSpec:
    """What `device` reaches: rates of products by dtype and of memory, seconds of the least op."""
    on_host = device.type == "cpu"
    side = sizes.matmul_side if on_host else _LARGER_ON_A_CARD * sizes.matmul_side
    flops_per_s = {
        name_of(dtype): product_flops_per_s(bench, device, dtype, side, sizes)
        for dtype in (_HOST_DTYPES if on_host else _CARD_DTYPES)
    }
    count = sizes.copy_bytes // 4
    x, y, total = (torch.ones(count, device=device) for _ in range(3))
    add_s = sizes.least_s(lambda: bench.seconds(lambda: torch.add(x, y, out=total)))
    return TierSpec(
        capacity_bytes=capacity_bytes,
        bytes_per_s=3 * 4 * count / add_s,
        flops_per_s=flops_per_s,
        launch_s=least_op_s(sizes.repeats, bench.seconds, sizes.until_s)
        if on_host
        else _launch_s(bench, device, sizes),
    )


def with_constants(
    bench: Bench, tier: TierSpec, device: torch.device, sizes: Sizes
) -> tuple[TierSpec, tuple[str, ...]]:
    """`tier` with what was measured of each class of op, and what could not be."""
    if device.type != "cpu":  # it does not wait for each op, so that its ops have no starts
        factors = factors_of(bench, tier, device, sizes)
        return replace(tier, factors=factors.by_kind), factors.remarks
    free_a_large_result()
    found = constants_of(bench, tier, device, sizes)
    return replace(tier, factors=found.factors, starts_s=found.starts_s), found.remarks


def _launch_s(bench: Bench, device: torch.device, sizes: Sizes) -> float:
    """Seconds of a kernel that does nothing, behind others."""
    one = torch.ones(1, device=device)

    def launches() -> None:
        for _ in range(_CALLS_PER_LAUNCH_SAMPLE):
            torch.add(one, one, out=one)

    return sizes.least_s(lambda: bench.seconds(launches)) / _CALLS_PER_LAUNCH_SAMPLE


def _host_update(
    bench: Bench, environment: Environment, sizes: Sizes
) -> tuple[HostUpdate, dict[int, float], str]:
    """Updates on the host, their rates by thread count, and what to know of them.

    As in a step they run on a thread beside the one that computes: with threads of both, OpenMP has
    those that wait sleep, where it else spins for milliseconds on cores that others want.
    """
    own = torch.get_num_threads()
    with ThreadPoolExecutor(1) as lane:
        parameters = lane.submit(_beyond_caches, environment, sizes).result()
        by_threads = lane.submit(_host_update_rates, environment, sizes, parameters, own).result()
    slowdown, remark = _believed(
        "times as long takes a host update beside a copy",
        _slowdown_while_copying(bench, sizes, parameters),
        most=_MOST_SLOWDOWN,
        assumed=_MOST_SLOWDOWN,
    )
    update = HostUpdate(
        by_threads[own],
        slowdown_while_copying=slowdown,
        elements_per_s=elements_per_s(sizes.repeats, until_s=sizes.until_s),
        fresh_bytes_per_s=fresh_bytes_per_s(sizes.repeats, until_s=sizes.until_s),
    )
    return update, by_threads, remark


def _host_update_rates(
    environment: Environment, sizes: Sizes, parameters: int, own: int
) -> dict[int, float]:
    """Bytes per second of a fused AdamW update at 1, 2, 4, ... threads, at all cores and at `own`.

    That is how many a step has, which the thread that measures need not have.
    """
    cores, before = environment.usable_cores, torch.get_num_threads()
    update = adamw_update(parameters)
    update_bytes = parameters * presets.ADAMW_BYTES_PER_PARAMETER
    rates = {}
    try:
        for threads in sorted({*(2**k for k in range((cores - 1).bit_length())), cores, own}):
            torch.set_num_threads(threads)
            rates[threads] = update_bytes / sizes.least_s(partial(wall_s, update))
    finally:
        torch.set_num_threads(before)
    return rates


def _beyond_caches(environment: Environment, sizes: Sizes) -> int:
    """How many parameters an update has to have until the caches no longer make it faster.

    A server's caches hold hundreds of megabytes, and a virtual machine does not say how many: the
    count is doubled until the rate stays, or a sixteenth of the memory is taken.
    """
    most = environment.usable_memory_bytes // (16 * _BYTES_HELD_PER_PARAMETER)
    parameters, before = sizes.updated_parameters, math.inf
    while 2 * parameters <= most and time.monotonic() < sizes.until_s:
        update_s = sizes.least_s(partial(wall_s, adamw_update(parameters)))
        rate = parameters / update_s
        if rate > _STAYS * before:
            break
        parameters, before = 2 * parameters, rate
    return parameters


def _slowdown_while_copying(bench: Bench, sizes: Sizes, parameters: int) -> float:
    update = adamw_update(parameters)
    alone_s = sizes.least_s(partial(wall_s, update))
    with bench.copying(sizes.copy_bytes):
        disturbed_s = sizes.least_s(partial(wall_s, update))
    return max(1.0, disturbed_s / alone_s)


def _device_for(bench: Bench) -> Device:
    """The runtime whose calls are measured."""
    if isinstance(bench, CudaBench):
        card = CudaCard(bench.device)
        # The process's own pool: one that ends with the measuring would leave memory registered
        # with the driver, which refuses whatever is mapped at that address next (CUDA error 712).
        return CudaDevice(card, pool(card.device.index), 2**62, {})
    budgets = dict.fromkeys(Tier, 2**62)
    return EmulatedDevice(presets.find(presets.THIS_MACHINE), budgets, {}, poison=False)


def issue_s(device: Device, until_s: float = math.inf) -> float:
    """Seconds that the step's thread takes to start a copy on `device` and to wait for it.

    Measured between matmuls, as in a step: on the emulated device the copy's thread competes for
    the interpreter. A card goes on meanwhile with what it has been given: it `runs_ahead`. The
    first copies pin the memory that later ones use again, so they do not count. From `until_s` of
    the monotonic clock on `_FEWEST_ISSUES` have to do: two or three on a busy computer would have
    a plan believe that each copy takes milliseconds of Python. It is the median of the quietest
    quarter: most copies wait for nobody, but other programs come and go.
    """
    place = device.compute_device
    a, product = torch.ones(256, 256, device=place), torch.ones(256, 256, device=place)

    def start_one_and_wait_for_the_last(number: int) -> None:
        device.offload(a, Launch(f"copy {number}"))
        device.wait([f"copy {number - 1}"] if number else [])

    device.start_step()
    seconds = []
    for number in range(_CALLS_PER_LAUNCH_SAMPLE):
        torch.mm(a, a, out=product)
        seconds.append(wall_s(partial(start_one_and_wait_for_the_last, number)))
        if number >= _FIRST_ISSUES + _FEWEST_ISSUES and time.monotonic() >= until_s:
            break
    device.drain()
    counted = seconds[_FIRST_ISSUES:]
    each = len(counted) // _ISSUE_PARTS
    return min(statistics.median(counted[i * each : (i + 1) * each]) for i in range(_ISSUE_PARTS))


def adamw_update(parameters: int) -> Callable[[], None]:
    """ATen's fused update of so many parameters."""
    values, gradients, first, second = ([torch.full((parameters,), 0.01)] for _ in range(4))
    steps = [torch.ones(())]

    def update() -> None:
        torch._fused_adamw_(
            values,
            gradients,
            first,
            second,
            [],
            steps,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-3,
            weight_decay=0.01,
            eps=1e-8,
            maximize=False,
        )

    return update


def _believed(what: str, measured: float, most: float, assumed: float) -> tuple[float, str]:
    """What to take for it, and what to say where that is not what was measured."""
    if measured <= most:
        return measured, ""
    told = f"{measured:.3g} {what}, as measured, and no quiet computer needs as much"
    return assumed, f"{told}: {assumed:g} is assumed"


def _threads_remark(bytes_per_s: Mapping[int, float]) -> str:
    rates = ", ".join(f"{rate / 1e9:.1f} GB/s on {n}" for n, rate in bytes_per_s.items())
    fastest, own = max(bytes_per_s, key=bytes_per_s.__getitem__), torch.get_num_threads()
    way_on = ""
    if bytes_per_s[fastest] > _FASTER * bytes_per_s[own]:
        way_on = f"; torch has {own}: set OMP_NUM_THREADS={fastest} before the start"
    return f"host updates by thread count: {rates}{way_on}"
