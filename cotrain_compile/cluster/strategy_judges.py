"""Strategy judges: each planner of the cluster, its plan as a `Strategy`.

In: a `Question`. Out: a `Strategy`, or an error that says why there is none: `PlacementError` where
nothing fits, `OptionError` where profile or cluster do not let it be judged. A planner may leave
devices idle: it is asked for the first 1, 2, ... of them, and the fastest answer counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, compress, pairwise

from cotrain_compile.cluster.data_parallel import (
    SHARD,
    DataParallelPlan,
    plan_data_parallel,
)
from cotrain_compile.cluster.data_parallel_works import Way
from cotrain_compile.cluster.description import Cluster, MachineGroup
from cotrain_compile.cluster.harmony import HarmonyPlan
from cotrain_compile.cluster.harmony_lanes import Stream
from cotrain_compile.cluster.helper_verdict import judge_helpers
from cotrain_compile.cluster.pipeline import fastest_pipeline
from cotrain_compile.cluster.pipeline_devices import devices_of
from cotrain_compile.cluster.stage_away import StageAway
from cotrain_compile.cluster.stage_plan import StagePlan
from cotrain_compile.cluster.stages import PipelineOrder
from cotrain_compile.cluster.stages_in_turn import TurnsPlan
from cotrain_compile.cluster.strategy import NOT_RUN, Question, Strategy
from cotrain_compile.cluster.strategy_burst import BurstPlan, plan_burst
from cotrain_compile.cluster.strategy_harmony import (
    packs_in_words,
    replicas_by_layer,
    stages_by_turns,
)
from cotrain_compile.cluster.subsets import first_devices
from cotrain_compile.plan import Timeline
from cotrain_compile.units import format_bytes

NO_PEAKS = "the profile knows no peaks, so nobody knows whether it fits"
TO_HOSTS = ("host to devices", "devices to host")
COMPILED = 'its step compiled with backend="cotrain"'
_SAVED = "the answer that -o saves"


def replicate(question: Question, name: str) -> Strategy:
    """All parameters on every device."""
    plan = plan_data_parallel(question.profile, question.cluster, question.samples)
    script = f"{launch(question.cluster, plan.devices)}: the model in DistributedDataParallel"
    return _data_parallel(question, name, plan, f"{script}, {COMPILED}")


def shard(question: Question, name: str) -> Strategy:
    """A part of parameters, gradients and states on each device."""
    plan = plan_data_parallel(question.profile, question.cluster, question.samples, SHARD)
    script = f"{launch(question.cluster, plan.devices)}: the layers and the model in fully_shard"
    return _data_parallel(question, name, plan, f"{script}, {COMPILED}")


def byteps(question: Question, name: str) -> Strategy:
    """`replicate` whose gradients CPU machines sum too; two or more machines with devices."""
    cluster, samples = question.cluster, question.samples
    profile = question.profile.on(cluster.kinds)
    judge_helpers(profile, cluster, samples)  # refuses what it is not for
    worked = [group for group in cluster.groups if group.devices]
    each = max(group.device_count for group in worked)
    machines = [group.device_count for group in worked for _ in range(group.count)]
    counts = list(accumulate(machines))[1:]
    latency_s = max(group.nic.latency_s for group in cluster.groups if group.nic)

    def all_reduce(part: Cluster) -> Callable[[float], float]:
        verdict = judge_helpers(profile, part, max(1, samples // len(part.devices)))
        rate_s = verdict.helpers_s / profile.grad_bytes
        return lambda nbytes: rate_s * nbytes + 2 * latency_s

    plan = plan_data_parallel(profile, cluster, samples, counts=counts, all_reduce=all_reduce)
    part = first_devices(cluster, plan.devices)
    verdict = judge_helpers(profile, part, samples // plan.devices)
    sharing = verdict.sharing
    cards = {
        "network cards of machines with devices": sharing.machines * sharing.machine_traffic_bytes,
        "network cards of CPU machines": sharing.helpers * sharing.helper_traffic_bytes,
    }
    run = f"{NOT_RUN} on machines of several devices"
    if each == 1:
        started = f"torchrun on {sharing.machines} + {sharing.helpers} machines, train.py"
        run = f"{started}: gradients by cotrain_compile.cpu_helpers(model, {sharing.helpers})"
    found = _data_parallel(question, name, plan, run)
    setting = f"{found.setting}; {sharing.helpers} CPU machines; {verdict.host}"
    # As often as gradients are exchanged: once a step, or of those away for each micro-batch.
    times = plan.sent_bytes / (2 * (plan.devices - 1) / plan.devices * profile.grad_bytes)
    traffic = {link: round(times * nbytes) for link, nbytes in cards.items()}
    traffic |= {link: found.traffic[link] for link in TO_HOSTS if link in found.traffic}
    return replace(found, setting=setting, traffic=traffic)


def _data_parallel(question: Question, name: str, plan: DataParallelPlan, run: str) -> Strategy:
    part = first_devices(question.cluster, plan.devices)
    machines = part.device_machines
    across = machines if machines > 1 else 0
    traffic = {
        "between devices of a machine": (plan.devices - across) * plan.sent_bytes,
        "between machines": across * plan.sent_bytes,
        "host to devices": plan.devices * plan.moved_bytes.get(Way.UP, 0),
        "devices to host": plan.devices * plan.moved_bytes.get(Way.DOWN, 0),
    }
    setting = _micro_batches(plan.micro_batches, plan.micro_batch, plan.recompute)
    if plan.gathering in SHARD and plan.devices > 1:
        setting += f", parameters {plan.gathering}{' in each' * (plan.micro_batches > 1)}"
    one = "one unit at a time, nothing ahead" if plan.one_at_a_time else ""
    setting = "; ".join(filter(None, (setting, plan.on_host, one)))
    moved = {link: nbytes for link, nbytes in traffic.items() if nbytes}
    found = _all_alike(question, name, plan, moved, _busiest(plan.timeline), setting, run)
    return replace(found, host_bytes=plan.devices * plan.host_bytes)


def _all_alike(
    question: Question,
    name: str,
    plan: DataParallelPlan | BurstPlan,
    traffic: Mapping[str, int],
    busiest: tuple[str, float],
    setting: str,
    run: str,
) -> Strategy:
    """All devices hold what the fullest one holds, if anybody knows that."""
    known = plan.peak_bytes is not None
    return _strategy(
        question,
        name,
        plan.step_s,
        plan.bound_s,
        None if plan.peak_bytes is None else (plan.peak_bytes,) * plan.devices,
        question.cluster.capacities_bytes[: plan.devices],
        traffic,
        busiest,
        plan.timeline,
        reason=_missing(plan.missing_bytes) if known else NO_PEAKS,
        setting=setting,
        run=run,
        fits=not plan.missing_bytes if known else None,
    )


def pipeline(question: Question, name: str) -> Strategy:
    """Stages of consecutive layers, by GPipe or 1F1B."""
    order = PipelineOrder(name.removeprefix("pipeline-"))
    profile, samples = question.profile, question.samples
    most = min(len(question.cluster.devices), len(profile.layers))
    rows = [devices_of(first_devices(question.cluster, count)) for count in range(1, most + 1)]
    plan = fastest_pipeline(profile, rows, order, samples, again_only=True)
    used = [first < last for first, last in pairwise(plan.stages.bounds)]
    hops = {f"hop {i} to {i + 1}": nbytes for i, nbytes in enumerate(plan.hop_bytes) if nbytes}
    down, up = plan.swapped_bytes
    hops |= {"devices to host": down, "host to devices": up} if down else {}
    setting = _micro_batches(plan.micro_batches, plan.micro_batch, plan.recompute)
    setting = "; ".join(filter(None, (setting, _on_hosts(plan.away))))
    splits = plan.stages.split_points
    if splits:
        setting += f"; stages begin at {', '.join(splits)}"
    return _strategy(
        question,
        name,
        plan.step_s,
        plan.bound_s,
        tuple(compress(plan.peak_bytes, used)),
        tuple(compress(question.cluster.capacities_bytes, used)),
        hops,
        _busiest(plan.timeline),
        plan.timeline,
        setting=setting,
        run=f"{launch(question.cluster, sum(used))}: {_pipeline(name)}",
        stages=StagePlan(
            order.value,
            splits,
            plan.micro_batches,
            plan.micro_batch,
            tuple(compress(plan.peak_bytes, used)),
        ),
        host_bytes=plan.host_bytes,
    )


def _pipeline(name: str) -> str:
    return f'the model and {_SAVED} in cotrain_compile.pipeline, with strategy="{name}"'


def harmony_dp(question: Question, name: str) -> Strategy:
    """Packs that come to each device of one machine for all micro-batches of its share."""
    plan, group = replicas_by_layer(question)
    moved: Counter[str] = Counter()
    for (stream, _), nbytes in plan.moved_bytes.items():
        moved[_HARMONY_LINKS[stream]] += round(nbytes)
    choice, n = plan.choice, plan.devices
    count = -(-question.samples // n // choice.backward_samples)
    script = f"torchrun --nproc-per-node {n} train.py: the model in DistributedDataParallel"
    option = ' and micro_batch_order="by-layer"' if count > 1 else ""
    return _of_server(
        question,
        name,
        plan,
        group,
        moved,
        f"{_micro_batches(count, choice.backward_samples, recompute=False)}, "
        f"{packs_in_words(choice)}",
        f"{script}, {COMPILED}{option}",
        copies=n,
    )


def harmony_pp(question: Question, name: str) -> Strategy:
    """Packs as stages that come to the devices of one machine by turns."""
    plan, group = stages_by_turns(question)
    layers = question.profile.layers
    begins = tuple(layers[pack.first].name for pack in plan.packs[1:])
    in_turn = len(plan.packs) > plan.devices
    setting = f"{_micro_batches(plan.micro_batches, plan.micro_batch, recompute=True)}; "
    ahead = ", the next one fetched ahead" if plan.ahead else ""
    found = _of_server(
        question,
        name,
        plan,
        group,
        Counter({link: round(nbytes) for link, nbytes in plan.moved_bytes.items()}),
        f"{setting}{len(plan.packs)} packs, dealt to the devices in turn{ahead}",
        f"torchrun --nproc-per-node {plan.devices} train.py: {_pipeline(name)}",
        copies=1,
    )
    stages = StagePlan(
        "LoopedBFS" if in_turn else "GPipe",
        begins,
        plan.micro_batches,
        plan.micro_batch,
        plan.peak_bytes,
        swapped=True,
        ahead=plan.ahead,
    )
    return replace(found, stages=stages)


_HARMONY_LINKS = {
    Stream.SWAP_IN: "host to devices",
    Stream.SWAP_OUT: "devices to host",
    Stream.PEER_IN: "between devices of a machine",
    Stream.PEER_OUT: "between devices of a machine",
    Stream.COMPUTE: "between devices of a machine",  # all-reduces, which computing waits for
    Stream.HOST: "within the host",
}


def _of_server(
    question: Question,
    name: str,
    plan: HarmonyPlan | TurnsPlan,
    group: MachineGroup,
    moved: Counter[str],
    setting: str,
    run: str,
    *,
    copies: int,
) -> Strategy:
    """The host has so many copies of the model."""
    idle = question.cluster.device_machines - 1
    return _strategy(
        question,
        name,
        plan.step_s,
        plan.bound_s,
        plan.peak_bytes,
        tuple(each.device.capacity_bytes for each in group.each)[: plan.devices],
        {link: nbytes for link, nbytes in moved.items() if nbytes},
        _busiest(plan.timeline),
        plan.timeline,
        setting=setting + (f"; one machine, {idle} idle" if idle else ""),
        run=run,
        host_bytes=copies * question.profile.resting_bytes,
    )


def burst(question: Question, name: str) -> Strategy:
    """A width for each layer."""
    plan = plan_burst(question.profile, question.cluster, question.samples)
    widths = Counter(plan.widths.values())
    layers = ", ".join(f"{widths[width]} on {width}" for width in sorted(widths))
    again = "; layers run again" if plan.recompute else ""
    busiest = ("compute", plan.compute_s) if plan.compute_s >= plan.network_s else plan.network
    setting = f"layers by devices: {layers}{again}"
    if not question.profile.is_chain:
        run = f"{NOT_RUN} for a model with branches"
        return _all_alike(question, name, plan, plan.traffic, busiest, setting, run)
    run = f"{launch(question.cluster, plan.devices)}: the model and {_SAVED} in "
    run += "cotrain_compile.burst"
    found = _all_alike(question, name, plan, plan.traffic, busiest, setting, run)
    return replace(found, widths=plan.widths)


def _strategy(
    question: Question,
    name: str,
    step_s: float,
    bound_s: float,
    peak_bytes: tuple[int, ...] | None,
    capacities_bytes: tuple[int, ...],
    traffic: Mapping[str, int],
    busiest: tuple[str, float],
    timeline: Timeline | None,
    *,
    reason: str = "",
    setting: str = "",
    run: str,
    fits: bool | None = True,
    stages: StagePlan | None = None,
    host_bytes: int = 0,
) -> Strategy:
    samples_per_s = question.samples / step_s if step_s else None
    tokens = question.profile.tokens_per_sample
    return Strategy(
        name,
        step_s,
        min(bound_s, step_s),
        samples_per_s,
        samples_per_s * tokens if samples_per_s else None,
        peak_bytes,
        len(capacities_bytes),
        traffic,
        fits,
        reason,
        *busiest,
        setting=setting,
        run=run,
        stages=stages,
        capacities_bytes=capacities_bytes,
        host_bytes=host_bytes,
        timeline=timeline,
    )


def _busiest(timeline: Timeline) -> tuple[str, float]:
    busy: defaultdict[str, float] = defaultdict(float)
    for span in timeline.spans:
        busy[str(span.lane)] += span.end_s - span.start_s
    return max(busy.items(), key=lambda lane: lane[1])


def _micro_batches(count: int, each: int, recompute: bool) -> str:
    batches = f"{count} micro-batches of {each}" if count > 1 else f"one micro-batch of {each}"
    return batches + (", layers run again" if recompute else "")


def _on_hosts(away: Sequence[StageAway]) -> str:
    """What of a pipeline rests on hosts."""
    states, kept = sum(each.states for each in away), sum(each.kept for each in away)
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
