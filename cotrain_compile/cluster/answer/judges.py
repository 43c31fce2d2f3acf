"""Judges: each planner of the cluster, its plan as a `RankedStrategy`.

In: a `Question`. Out: a `RankedStrategy`, or an error that says why there is none: `PlacementError`
where nothing fits, `OptionError` where profile or cluster do not let it be judged. A planner may
leave devices idle: it is asked for the first 1, 2, ... of them, and the fastest answer counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress, pairwise
from math import ceil

from cotrain_compile.cluster.data_parallel.data_parallel import (
    SHARD,
    DataParallelPlan,
    plan_data_parallel,
)
from cotrain_compile.cluster.data_parallel.step import Sharding
from cotrain_compile.cluster.helpers import judge_helpers
from cotrain_compile.cluster.model.description import Cluster, MachineGroup, first_devices
from cotrain_compile.cluster.model.layout import Layout, StagePlan
from cotrain_compile.cluster.model.strategy import Question, RankedStrategy
from cotrain_compile.cluster.pipeline.cuts import PipelineOrder, devices_of
from cotrain_compile.cluster.pipeline.pipeline import plan_pipeline
from cotrain_compile.cluster.steps.rank_memory import Residence
from cotrain_compile.cluster.steps.spent import spent_s
from cotrain_compile.cluster.steps.stage_step import Does, StageStep
from cotrain_compile.cluster.swapped.replicas import (
    SwappedReplicas,
    replicas_by_layer,
    stages_by_turns,
)
from cotrain_compile.cluster.swapped.turn_step import StagesInTurn
from cotrain_compile.cluster.widths import BurstPlan, plan_burst
from cotrain_compile.errors import OptionError
from cotrain_compile.support.units import format_bytes

NO_PEAKS = "the profile knows no peaks, so nobody knows whether it fits"
TO_HOSTS = ("host to devices", "devices to host")
COMPILED = 'its step compiled with backend="cotrain"'
# Of a step with more tasks there is no timeline.
MOST_DRAWN = 20_000
_SAVED = "the answer that -o saves"


def judge_replicate(question: Question, name: str) -> RankedStrategy:
    """All parameters on every device."""
    plan = plan_data_parallel(question.profile, question.cluster, question.samples)
    script = f"{launch(question.cluster, plan.devices)}: the model in DistributedDataParallel"
    return _data_parallel(question, name, plan, f"{script}, {COMPILED}")


def judge_shard(question: Question, name: str) -> RankedStrategy:
    """A part of parameters, gradients and states on each device."""
    plan = plan_data_parallel(question.profile, question.cluster, question.samples, SHARD)
    script = f"{launch(question.cluster, plan.devices)}: the layers and the model in fully_shard"
    return _data_parallel(question, name, plan, f"{script}, {COMPILED}")


def judge_byteps(question: Question, name: str) -> RankedStrategy:
    """`replicate` whose gradients CPU machines sum too; two or more machines with devices."""
    cluster, samples = question.cluster, question.samples
    profile = question.profile.on(cluster.kinds)
    judge_helpers(profile, cluster, samples)  # refuses what it is not for
    if not cluster.cpu_machines:
        raise OptionError(
            f"{cluster.name} has no machines without devices, which could help; take `replicate`"
        )
    latency_s = max(group.nic.latency_s for group in cluster.groups if group.nic)

    def sums_of(part: Cluster) -> Callable[[float], float]:
        verdict = judge_helpers(profile, part, max(1, samples // len(part.devices)))
        rate_s = verdict.helpers_s / profile.grad_bytes
        return lambda nbytes: rate_s * nbytes + 2 * latency_s

    each = next(group.device_count for group in cluster.groups if group.devices)
    counts = range(2 * each, len(cluster.devices) + 1, each)
    plan = plan_data_parallel(profile, cluster, samples, counts=counts, sums_of=sums_of)
    part = first_devices(cluster, plan.devices)
    verdict = judge_helpers(profile, part, samples // plan.devices)
    sharing = verdict.sharing
    cards = {
        "network cards of machines with devices": sharing.machines * sharing.machine_traffic_bytes,
        "network cards of CPU machines": sharing.helpers * sharing.helper_traffic_bytes,
    }
    started = f"torchrun on {sharing.machines} + {sharing.helpers} machines, train.py"
    beside = f", devices_a_machine={each}" if each > 1 else ""
    run = f"{started}: gradients by cotrain_compile.cpu_helpers(model, {sharing.helpers}{beside})"
    if plan.beside_forward:
        run += ", backwards within its ahead_of_forward(model, optimizers)"
    found = _data_parallel(question, name, plan, run)
    ahead = (
        "; half of the exchange beside the next forward, without clipping"
        if plan.beside_forward
        else ""
    )
    setting = f"{found.setting}{ahead}; {sharing.helpers} CPU machines; {verdict.host}"
    # As often as gradients are exchanged: once a step, or where offloaded for each micro-batch.
    times = plan.sent_bytes / (2 * (plan.devices - 1) / plan.devices * profile.grad_bytes)
    traffic = {link: round(times * nbytes) for link, nbytes in cards.items()}
    traffic |= {link: found.traffic[link] for link in TO_HOSTS if link in found.traffic}
    return replace(found, setting=setting, traffic=traffic, layout=None)


def _data_parallel(
    question: Question, name: str, plan: DataParallelPlan, run: str
) -> RankedStrategy:
    devices, replicas, moved = plan.devices, plan.replicas, plan.step.moved_bytes
    machines = plan.cluster.device_machines
    across = machines if machines > 1 else 0
    traffic = {
        "between devices of a machine": (devices - across) * plan.sent_bytes,
        "between machines": across * plan.sent_bytes,
        "host to devices": devices * ceil(moved[Does.FETCH]),
        "devices to host": devices * ceil(moved[Does.STORE]),
    }
    setting = micro_batches_in_words(replicas.micro_batches, replicas.micro_batch, plan.recompute)
    if replicas.sharding in SHARD and devices > 1:
        setting += f", parameters {replicas.sharding}"
        setting += " in each" * (replicas.micro_batches > 1)
    if plan.by_speed:
        setting += f"; samples by speed: {_shares(plan)}"
        how = f'the model and {_SAVED} in cotrain_compile.scale, strategy="{name}"'
        run = f"{launch(question.cluster, devices)}: {how}"
    on_host = replicas.residence.in_words(len(replicas.units))
    one = "one unit at a time, nothing ahead" if replicas.ahead == 1 else ""
    setting = "; ".join(filter(None, (setting, on_host, one)))
    found = _all_alike(question, name, plan.step, plan, traffic, setting, run)
    return replace(found, host_bytes=plan.host_bytes, layout=_layout(plan))


def _layout(plan: DataParallelPlan) -> Layout:
    """Micro-batches, and of samples by speed how many each rank has."""
    replicas = plan.replicas
    sharded = replicas.sharding in SHARD
    return Layout(
        replicate=1 if sharded else plan.devices,
        shard=plan.devices if sharded else 1,
        gathered_again=replicas.sharding is Sharding.AGAIN,
        recompute=plan.recompute,
        micro_batches=replicas.micro_batches,
        micro_batch=replicas.micro_batch,
        samples=tuple(replicas.micro_batches * own for own in plan.by_speed),
    )


def _shares(plan: DataParallelPlan) -> str:
    """Of a micro-batch, by kind of device."""
    each: dict[str, set[int]] = {}
    for kind, own in zip(plan.cluster.kinds, plan.by_speed, strict=True):
        each.setdefault(kind, set()).add(own)
    words = ((kind, " or ".join(map(str, sorted(own)))) for kind, own in each.items())
    return ", ".join(f"{own} on each {kind}" for kind, own in words)


def judge_burst(question: Question, name: str) -> RankedStrategy:
    """A width for each layer."""
    plan = plan_burst(question.profile, question.cluster, question.samples)
    widths = Counter(plan.widths.values())
    layers = ", ".join(f"{widths[width]} on {width}" for width in sorted(widths))
    again = "; layers run again" if plan.recompute else ""
    setting = f"layers by devices: {layers}{again}"
    started = f"{launch(question.cluster, plan.devices)}: the model and {_SAVED} in "
    run = f"{started}cotrain_compile.burst"
    found = _all_alike(question, name, plan, plan, plan.traffic, setting, run)
    return replace(found, widths=plan.widths)


def _all_alike(
    question: Question,
    name: str,
    step: StageStep | BurstPlan,
    plan: DataParallelPlan | BurstPlan,
    traffic: Mapping[str, int],
    setting: str,
    run: str,
) -> RankedStrategy:
    """All devices do the same, or all of a kind, if anybody knows what they hold."""
    capacities = question.cluster.capacities_bytes[: plan.devices]
    missing = plan.missing_bytes
    if isinstance(plan, DataParallelPlan):
        peaks = plan.peaks_bytes
    else:
        peaks = None if plan.peak_bytes is None else (plan.peak_bytes,) * plan.devices
    if peaks is None:
        found = a_strategy(question, name, step, traffic, None, capacities, setting, run)
        return replace(found, reason=NO_PEAKS, fits=None)
    found = a_strategy(question, name, step, traffic, peaks, capacities, setting, run)
    return replace(found, reason=_missing(missing), fits=not missing)


def judge_pipeline(question: Question, name: str) -> RankedStrategy:
    """Stages of consecutive layers, by GPipe or 1F1B."""
    order = PipelineOrder(name.removeprefix("pipeline-"))
    profile, samples = question.profile, question.samples
    most = min(len(question.cluster.devices), len(profile.layers))
    rows = [devices_of(first_devices(question.cluster, count)) for count in range(1, most + 1)]
    plan = plan_pipeline(profile, rows, order, samples, again_only=True)
    used = [first < last for first, last in pairwise(plan.cut.bounds)]
    peaks = tuple(compress(plan.cut.peak_bytes, used))
    hops = {f"hop {i} to {i + 1}": nbytes for i, nbytes in enumerate(plan.hop_bytes)}
    stored, fetched = plan.swapped_bytes
    setting = micro_batches_in_words(plan.micro_batches, plan.micro_batch, plan.recompute)
    setting = "; ".join(filter(None, (setting, on_hosts(plan.residence))))
    splits = plan.cut.split_points
    if splits:
        setting += f"; stages begin at {', '.join(splits)}"
    found = a_strategy(
        question,
        name,
        plan.step,
        hops | {"devices to host": stored, "host to devices": fetched},
        peaks,
        tuple(compress(question.cluster.capacities_bytes, used)),
        setting,
        f"{launch(question.cluster, sum(used))}: {_pipeline(name)}",
    )
    stages = StagePlan(order.value, splits, plan.micro_batches, plan.micro_batch, peaks)
    return replace(found, stages=stages, host_bytes=plan.host_bytes)


def _pipeline(name: str) -> str:
    return f'the model and {_SAVED} in cotrain_compile.pipeline, with strategy="{name}"'


def judge_harmony_dp(question: Question, name: str) -> RankedStrategy:
    """Packs that come to each device of one machine for all micro-batches of its share."""
    plan, group = replicas_by_layer(question)
    n, count = plan.devices, plan.micro_batches
    setting = micro_batches_in_words(count, plan.micro_batch, recompute=False)
    layout = Layout(replicate=n, micro_batches=count, micro_batch=plan.micro_batch)
    found = _of_machine(
        question,
        name,
        plan,
        group,
        n,
        f"{setting}, {_packs_in_words(plan)}",
        f"torchrun --nproc-per-node {n} train.py: the model and {_SAVED} in "
        f'cotrain_compile.scale, strategy="{name}"',
    )
    return replace(found, layout=layout)


def _packs_in_words(plan: SwappedReplicas) -> str:
    """How many packs there are in either pass."""
    forward, backward = len(plan.forward), len(plan.backward)
    if not forward:
        return f"{backward} pack{'s' * (backward > 1)} for both passes"
    packs = "1 pack" if forward == 1 else f"{forward} packs"
    return f"{packs} forward, {backward} backward, the last with its forward"


def judge_harmony_pp(question: Question, name: str) -> RankedStrategy:
    """Packs as stages that come to the devices of one machine by turns."""
    plan, group = stages_by_turns(question)
    setting = f"{micro_batches_in_words(plan.micro_batches, plan.micro_batch, recompute=True)}; "
    ahead = ", the next one fetched ahead" if plan.ahead else ""
    found = _of_machine(
        question,
        name,
        plan,
        group,
        1,
        f"{setting}{len(plan.packs)} packs, dealt to the devices in turn{ahead}",
        f"torchrun --nproc-per-node {plan.devices} train.py: {_pipeline(name)}",
    )
    layers = question.profile.layers
    stages = StagePlan(
        "LoopedBFS" if len(plan.packs) > plan.devices else "GPipe",
        tuple(layers[pack.first].name for pack in plan.packs[1:]),
        plan.micro_batches,
        plan.micro_batch,
        plan.peak_bytes,
        swapped=True,
        ahead=plan.ahead,
    )
    return replace(found, stages=stages)


def _of_machine(
    question: Question,
    name: str,
    plan: SwappedReplicas | StagesInTurn,
    group: MachineGroup,
    copies: int,
    setting: str,
    run: str,
) -> RankedStrategy:
    """The host has so many copies of the model, and so many devices do the same."""
    moved = plan.step.moved_bytes
    traffic = {
        "host to devices": round(copies * moved[Does.FETCH]),
        "devices to host": round(copies * moved[Does.STORE]),
        "between devices of a machine": round(copies * (moved[Does.SEND] + moved[Does.SUM])),
    }
    idle = question.cluster.device_machines - 1
    setting += f"; one machine, {idle} idle" if idle else ""
    capacities = tuple(each.device.capacity_bytes for each in group.each)[: plan.devices]
    found = a_strategy(
        question, name, plan.step, traffic, plan.peak_bytes, capacities, setting, run
    )
    return replace(found, host_bytes=copies * question.profile.resting_bytes)


def a_strategy(
    question: Question,
    name: str,
    step: StageStep | BurstPlan,
    traffic: Mapping[str, int],
    peak_bytes: tuple[int, ...] | None,
    capacities_bytes: tuple[int, ...],
    setting: str,
    run: str,
    exchanging: float = 0.0,
) -> RankedStrategy:
    """One that fits, of a step that was simulated; `exchanging` as `spent_s` has it."""
    samples_per_s = question.samples / step.seconds if step.seconds else None
    busiest, busiest_s = step.busiest
    tokens = question.profile.tokens_per_sample
    return RankedStrategy(
        name,
        step.seconds,
        min(step.bound_s, step.seconds),
        samples_per_s,
        samples_per_s * tokens if samples_per_s else None,
        peak_bytes,
        len(capacities_bytes),
        {link: nbytes for link, nbytes in traffic.items() if nbytes},
        fits=True,
        busiest=busiest,
        busiest_s=busiest_s,
        setting=setting,
        run=run,
        capacities_bytes=capacities_bytes,
        timeline=None if too_long(step) else step.timeline,
        spent_s=spent_s(step, exchanging) if isinstance(step, StageStep) else {},
    )


def too_long(step: StageStep | BurstPlan) -> bool:
    """Whether it has more tasks than anybody looks at."""
    return isinstance(step, StageStep) and len(step.tasks) > MOST_DRAWN


def micro_batches_in_words(count: int, each: int, recompute: bool) -> str:
    """How many of which size, and whether layers run again."""
    batches = f"{count} micro-batches of {each}" if count > 1 else f"one micro-batch of {each}"
    return batches + (", layers run again" if recompute else "")


def on_hosts(residence: Sequence[Residence]) -> str:
    """What of a pipeline rests on hosts."""
    states, kept = sum(each.states for each in residence), sum(each.kept > 0 for each in residence)
    said = [f"states of {states} layer{'s' * (states > 1)}"] if states else []
    said += [f"kept values of {kept} stage{'s' * (kept > 1)}"] if kept else []
    return f"on the host {' and '.join(said)}" if said else ""


def _missing(nbytes: int) -> str:
    """What is too little where hosts hold what they can."""
    return f"needs {format_bytes(nbytes)} more on the smallest device" if nbytes else ""


def launch(cluster: Cluster, count: int) -> str:
    """How torchrun starts a rank on each of the first devices."""
    machines: Iterable[tuple[int, int]] = (
        (place.group, place.machine) for place in cluster.devices[:count]
    )
    ranks = list(Counter(machines).values())
    if len(ranks) == 1:
        return f"torchrun --nproc-per-node {ranks[0]} train.py"
    if len(set(ranks)) == 1:
        nodes = f"--nnodes {len(ranks)} --nproc-per-node {ranks[0]}"
        return f"on each machine torchrun {nodes} train.py"
    return f"torchrun on {len(ranks)} machines with {ranks} ranks, train.py"
