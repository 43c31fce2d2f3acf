"""Summary: a plan in words: what lives and runs where, what moves, and how good the plan is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.order.by_layer import find_micro_batches
from cotrain_compile.placement.placed import place_as_planned
from cotrain_compile.placement.recompute.rewrite import again_name, recomputed_ops
from cotrain_compile.placement.simulate.reserved import Reserved, reserved
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import HostRegion, Lane, Plan, SolveReport, Transfer, UpdateMode
from cotrain_compile.presets import published_range_s
from cotrain_compile.support.plan_words import named_plan, plan_words
from cotrain_compile.support.units import format_bytes, format_seconds


def summary(plan: Plan, dataflow: Dataflow | None = None, *, ranked: bool = True) -> str:
    """What the plan is, update modes, what leaves the device, memory, traffic, time, the search.

    With the `dataflow` that the plan was made for, each update mode has its bytes as well:
    parameters with their optimizer states. `ranked` adds what other candidates take, on one line.
    """
    report = plan.report
    return "\n".join(
        [
            f"plan        {named_plan(plan.placement.policy)} on {plan.on_machine}",
            *(f"{'':11} {note}" for note in plan.notes),
            *_updates(plan, dataflow),
            *_fetched(plan),
            *(f"order       {told}" for told in order_words(plan, dataflow)),
            *(f"recomputes  {told}" for told in recompute_words(plan, dataflow)),
            *_memory(plan),
            *(f"{'':11} {told}" for told in (reserved_words(plan, dataflow) if dataflow else ())),
            f"traffic     {format_bytes(plan.bytes_moved('offload'))} down, "
            f"{format_bytes(plan.bytes_moved('prefetch'))} up each step",
            *_step_time(plan),
            *_overlap(plan),
            *(_solver(report) if report else ()),
            *(_ranked(report) if report and ranked else ()),
        ]
    )


def order_words(plan: Plan, dataflow: Dataflow | None) -> Iterator[str]:
    """In which order micro-batches run, where that is not the step's own."""
    size = plan.placement.layers_per_pack
    if not size:
        return
    of_layers = f"packs of {size} layers" if size > 1 else "packs of one layer"
    told = f"micro-batches run breadth first in {of_layers}"
    if dataflow is not None:
        found = find_micro_batches(dataflow)
        told = f"{found.count} {told}, of {len(found.layers)}"
    moved = any(plan.placement.homes[p] is Tier.HOST for p in plan.placement.updates)
    yield f"{told}: each weight moves once a pass" if moved else told


def recompute_words(plan: Plan, dataflow: Dataflow | None) -> Iterator[str]:
    """How much is made again for the backward, and in what time; nothing where nothing is.

    Without the `dataflow` of the step nobody knows how large it is.
    """
    names = plan.placement.recomputed
    if not names:
        return
    if dataflow is None:
        yield f"{len(names)} values"
        return
    dataflow = split_regions(dataflow, plan.placement.splits)
    again = recomputed_ops(dataflow, names, plan.placement.recomputed_apart)
    spans = plan.predicted.lane(Lane.DEVICE)
    taken_s = sum(span.end_s - span.start_s for span in spans if span.name in again)
    nbytes = sum(dataflow.buffer[name].nbytes for name in names if name in dataflow.buffer)
    yield f"{format_bytes(nbytes)} in {format_seconds(taken_s)} of the step"
    gathers = {again_name(op.name) for op in dataflow.ops if op.collective is not None}
    begun = gathers.intersection(again)
    if begun:
        sent = (s for s in plan.predicted.lane(Lane.NETWORK) if s.name.split(".", 1)[-1] in begun)
        network_s = sum(span.end_s - span.start_s for span in sent)
        told = f"{format_seconds(network_s)} of the network"
        yield f"{len(begun)} gathers of parameters among it, in {told}"


# Below, the allocator's segments of 2 and 20 MiB are more than what is in them.
LEAST_TO_FRAGMENT_BYTES = 2**27
EXPANDABLE = (
    "that is above the budget: with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, memory is "
    "not in pieces"
)

Rows = Iterator[tuple[str, ...]]


def comparison(answers: Sequence[Plan | PlacementError]) -> Rows:
    """Plans side by side: rows of a table, what a row tells and then one cell for each answer."""
    yield "plan", *(_name(answer) for answer in answers)
    for heading, tell in _TOLD.items():
        yield heading, *(tell(a) if isinstance(a, Plan) else "" for a in answers)


def is_only_resident(report: SolveReport) -> bool:
    """Whether nothing else was tried, as everything fits on the device.

    That no program was needed does not say so: a rule may have been the fastest of many plans.
    """
    return {policy.partition("+")[0] for policy in report.simulated_s} == {"resident"}


def candidates(answers: Sequence[Plan | PlacementError], rules: Sequence[str]) -> Rows:
    """Rows as of `comparison`: the simulated step time of each candidate, and which do not fit.

    `rules` are among the candidates. No rows where everything fits, as nothing else was tried then.
    """
    reports = [a.report for a in answers if isinstance(a, Plan) and a.report]
    if all(map(is_only_resident, reports)):
        return
    tried = [policy for report in reports for policy in report.simulated_s]
    for policy in dict.fromkeys((*rules, *tried)):
        yield plan_words(policy), *(_candidate(answer, policy) for answer in answers)


def search(report: SolveReport, *, with_bound: bool = False) -> str:
    """How a search went: what was the fastest when it was found, and what ended it.

    On request with the bound, which was looked for beside it.
    """
    found = ", ".join(
        f"{format_seconds(one.seconds)} by {plan_words(one.name)} after {one.work:.1f}"
        for one in report.course
    )
    bound_s = report.lower_bound_s if with_bound else 0.0
    bound = f"{report.bound_name} {format_seconds(bound_s)} after {report.bound_work:.1f}"
    ended = f"it ended after {report.work:.1f}: {report.ended}"
    told = ["the search, in units of work", found, bound if bound_s else "", ended]
    return "; ".join(filter(None, told))


def _name(answer: Plan | PlacementError) -> str:
    if isinstance(answer, Plan):
        return plan_words(answer.placement.policy)
    return f"none: {format_bytes(answer.shortfall_bytes)} short"


_TOLD: Mapping[str, Callable[[Plan], str]] = {
    "a step": lambda plan: format_seconds(plan.predicted.makespan_s),
    "rates": lambda plan: plan.rates.value,
    "above the bound": lambda plan: _above_bound(plan.report),
    "status": lambda plan: plan.report.status if plan.report else "",
    "device peak": lambda plan: format_bytes(plan.predicted.peak_bytes[Tier.DEVICE]),
    "down each step": lambda plan: format_bytes(plan.bytes_moved("offload")),
    "up each step": lambda plan: format_bytes(plan.bytes_moved("prefetch")),
}


def _above_bound(report: SolveReport | None) -> str:
    return f"{report.gap:.1%}" if report and report.lower_bound_s else ""


def _candidate(answer: Plan | PlacementError, policy: str) -> str:
    if isinstance(answer, PlacementError) or answer.report is None:
        return ""
    seconds = answer.report.simulated_s.get(policy)
    if seconds is not None:
        return format_seconds(seconds)
    return "not tried" if is_only_resident(answer.report) else "does not fit"


_BEST = 5  # of the candidates that fit, on one line
WHERE: Mapping[UpdateMode, str] = {
    UpdateMode.RESIDENT: "on the device",
    UpdateMode.STREAMED: "on the device with states from the host",
    UpdateMode.HOST: "on the host",
    UpdateMode.HOST_STREAMED: "on the host with the weight",
}


def _updates(plan: Plan, dataflow: Dataflow | None) -> Iterator[str]:
    params: dict[UpdateMode, list[str]] = {}
    for param, mode in plan.placement.updates.items():
        params.setdefault(mode, []).append(param)
    words = []
    for mode, names in params.items():
        size = f" ({format_bytes(_bytes_with_states(dataflow, names))})" if dataflow else ""
        words.append(f"{len(names)} {WHERE[mode]}{size}")
    if words:
        yield "updates     " + ", ".join(words)
    homes = Counter(tier.value for tier in plan.placement.homes.values())
    if homes:
        yield "homes       " + ", ".join(f"{n} tensors on {tier}" for tier, n in homes.items())


def _bytes_with_states(dataflow: Dataflow, params: Iterable[str]) -> int:
    groups = [dataflow.update[param] for param in params]
    return sum(dataflow.buffer[n].nbytes for g in groups for n in (g.param, *g.states))


def _fetched(plan: Plan) -> Iterator[str]:
    """Weights at home on the host, and activations that leave between forward and backward."""
    offloads = [t for t in plan.transfers if t.direction == "offload"]
    left = {t.buffer for t in offloads if not t.destination}
    # What is written back and is no parameter is an optimizer state.
    states = {t.destination for t in offloads} - set(plan.placement.updates)
    activations: list[Transfer] = []
    weights: list[Transfer] = []
    for transfer in plan.transfers:
        if transfer.is_fetch and transfer.buffer not in states:
            (activations if transfer.buffer in left else weights).append(transfer)
    if weights:
        times = Counter(transfer.buffer for transfer in weights)
        again = sum(count > 1 for count in times.values())
        yield (
            f"weights     {len(times)} fetched for their uses, {again} of them more than once, "
            f"{format_bytes(_nbytes(weights))} up"
        )
    if activations:
        yield (
            f"activations {len(activations)} leave the device between their uses, "
            f"{format_bytes(_nbytes(activations))}"
        )


def reserved_on_card(plan: Plan, dataflow: Dataflow) -> Reserved | None:
    """What torch's caching allocator takes from a card for the plan; None where it is small."""
    if plan.predicted.peak_bytes[Tier.DEVICE] < LEAST_TO_FRAGMENT_BYTES:
        return None
    return reserved(place_as_planned(dataflow, plan))


def reserved_words(plan: Plan, dataflow: Dataflow) -> Iterator[str]:
    """The same in words, and what to do where that is above the budget."""
    found = reserved_on_card(plan, dataflow)
    if found is None:
        return
    yield (
        f"{format_bytes(found.reserved_bytes)} reserved by torch's allocator on a card, "
        f"{found.fragment_bytes / max(1, found.reserved_bytes):.0%} of it in no tensor at the peak"
    )
    if found.reserved_bytes > plan.budgets[Tier.DEVICE]:
        yield EXPANDABLE


def _nbytes(transfers: Iterable[Transfer]) -> int:
    return sum(transfer.nbytes for transfer in transfers)


def _memory(plan: Plan) -> Iterator[str]:
    for tier in plan.tiers:
        # What the host holds depends on how fast its lanes are; on the device it does not.
        most = "at most " if tier is Tier.HOST else ""
        peak, budget = plan.predicted.peak_bytes[tier], plan.budgets[tier]
        yield f"{tier.value:11} peak {most}{format_bytes(peak)} of {format_bytes(budget)}"


def _overlap(plan: Plan) -> Iterator[str]:
    if updates := sum(isinstance(task, HostRegion) for task in plan.deferred):
        yield f"overlap     {updates} updates on the host may end in the next step"


def _step_time(plan: Plan) -> Iterator[str]:
    """The one step time that counts, and how far from the best it may be."""
    report, step_s = plan.report, plan.predicted.makespan_s
    told = f"{format_seconds(step_s)} a step{range_words(plan.machine, step_s)}"
    if report is None or not report.lower_bound_s:
        yield f"{plan.foreseen:11} {told}"
        return
    least = format_seconds(report.lower_bound_s)
    yield f"{plan.foreseen:11} {told}, {report.gap:.1%} above {least}, below which no plan is"
    if report.unknown_ops:
        yield f"{'':11} not certified: it is a {report.bound_name}"


def range_words(machine: str, seconds: float) -> str:
    """How far off it may be: what published steps say of a preset; nothing of another machine."""
    found = published_range_s(machine, seconds)
    if found is None:
        return ""
    least, most = map(format_seconds, found)
    return f" ({least} to {most} by published steps)"


def _solver(report: SolveReport) -> Iterator[str]:
    rounds = f", {report.rounds} rounds" if report.rounds > 1 else ""
    yield f"search      {search_words(report)}"
    yield f"solver      {report.solver}: {report.status}{rounds}, seed {report.seed}"


def search_words(report: SolveReport) -> str:
    """How long the search took, and how good its plan is at the least."""
    took = f"plan found in {format_seconds(report.seconds)}"
    if not report.lower_bound_s:
        return took
    if report.unknown_ops:
        return f"{took}, {report.gap:.1%} above the {report.bound_name}"
    return f"{took}, at most {report.gap:.1%} from the best possible"


def _ranked(report: SolveReport) -> Iterator[str]:
    if report.simulated_s:
        ranked = sorted(report.simulated_s.items(), key=lambda item: item[1])
        told = [f"{plan_words(policy)} {format_seconds(s)}" for policy, s in ranked[:_BEST]]
        yield f"tried       {'; '.join(told)}"
