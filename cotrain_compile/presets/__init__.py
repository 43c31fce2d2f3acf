"""Presets: machines that a step can be planned for without owning one. Names in, `Machine` out.

The figures and their sources are rows of `cards` and `tables`. A name may be followed by what is
otherwise: "rtx4090 host-memory=192GiB". A server of several cards ("8xh100") is what one of its
ranks has of it: its card, an equal share of the host, and a network to the others.

An AdamW update with float32 gradient, parameter and two moments reads 4 x 4 bytes and writes 3 x 4:
28 bytes per parameter. A bfloat16 gradient with a float32 master and a bfloat16 copy moves 28 as
well (2 + 24 + 2). `ADAMW_BYTES_PER_PARAMETER` turns published parameters per second into
`HostUpdate.bytes_per_s`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cotrain_compile.errors import OptionError, did_you_mean
from cotrain_compile.machine import HostUpdate, Link, Machine, Network, Rates, TierSpec, two_tier
from cotrain_compile.presets.cards import CARDS, Card
from cotrain_compile.presets.factors import RANGE, factors_of
from cotrain_compile.presets.tables import HOSTS, SERVERS, Host, Server, drive_beside
from cotrain_compile.support.limits import usable_core_count, usable_memory_bytes
from cotrain_compile.support.units import Size

ADAMW_BYTES_PER_PARAMETER = 28
THIS_MACHINE = "this-machine"

_GB = 10**9
_MIB = 2**20
_TERA = 10**12

# A copy or kernel that does nothing still takes this long: CUDA launch and DMA set-up, as commonly
# measured on current drivers.
_LAUNCH_S = 5e-6
_COPY_LATENCY_S = 10e-6
# What Python takes for a task, be it a copy or an update on the host: 23 to 26 microseconds of
# copies, 27 of plans with updates on the host (`bench/results/issue_cost.json`).
ISSUE_S = 26e-6
# What a round of an exchange takes beside its bytes. Assumed.
_ROUND_S = 10e-6
_HOST_LAUNCH_S = 10e-6


def _machine(card: Card, host: Host) -> Machine:
    """A GPU and its host. Updates and copies share the host's memory in proportion to demand."""
    update = host.adam * ADAMW_BYTES_PER_PARAMETER
    demand = update + host.up + host.down
    machine = two_tier(
        name=card.name,
        device=TierSpec(
            card.mib * _MIB, card.memory * _GB, _rates(card), _LAUNCH_S, factors_of(card)
        ),
        host=TierSpec(
            host.gb * _GB, host.memory * _GB, {"float32": host.tflops * _TERA}, _HOST_LAUNCH_S
        ),
        h2d=Link(host.up * _GB, _COPY_LATENCY_S),
        d2h=Link(host.down * _GB, _COPY_LATENCY_S),
        host_update=HostUpdate(
            float(round(update * _GB)), slowdown_while_copying=max(1.0, demand / host.memory)
        ),
        duplex=host.together,
        source=f"{card.source} Of memory {card.mib} MiB, as torch reports it; L2 {card.l2} MiB, "
        f"compute capability {card.chip[0]}.{card.chip[1]}. {host.source} Slowdown while copying: "
        "update and both links over the host's memory rate. Duplex, latencies and host flops: "
        "assumed; calibrate to replace them.",
        issue_s=ISSUE_S,
        runs_ahead=True,
        fuses_updates=True,
    )
    machine = machine.but(compute_capability=card.chip)
    return machine.with_disk(drive_beside(host.name))


def _rates(card: Card) -> dict[str, float]:
    """By dtype. What the card has no cores for is left out: it runs at the lowest rate.

    From Ampere on products of float32 cut to TF32 have half the rate of bfloat16 (NVIDIA's data
    sheets: 156 of 312 TFLOP/s on an A100, 82.6 of 165.2 on an RTX 4090, 495 of 989 on an H100).
    """
    cut = card.bfloat16 / 2 if card.chip >= (8, 0) else 0.0
    eight = dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), card.float8)
    known = {
        "bfloat16": card.bfloat16,
        "float16": card.float16,
        **eight,
        "tfloat32": cut,
        "float32": card.float32,
    }
    return {dtype: rate * _TERA for dtype, rate in known.items() if rate}


_HOSTS = {host.name: host for host in HOSTS}
CARDS_BY_NAME = {card.name: card for card in CARDS}


def _of_a_rank(server: Server) -> Machine:
    """What one rank of a server has while all of its cards are busy."""
    n = server.cards
    share = Host(
        "",
        server.gb // n,
        server.memory / n,
        server.tflops / n,
        server.up,
        server.down,
        server.adam / n,
        f"One of {n} ranks, with an equal share of the host. {server.source}",
        _HOSTS[CARDS_BY_NAME[server.card].host].together,
    )
    machine = _machine(CARDS_BY_NAME[server.card], share)
    network = Network(server.ring * _GB, _ROUND_S)
    return replace(machine.but(network=network), name=server.name)


PRESETS: Mapping[str, Machine] = {
    **{card.name: _machine(card, _HOSTS[card.host]) for card in CARDS},
    **{server.name: _of_a_rank(server) for server in SERVERS},
}
# How many ranks a server has cards for.
RANKS: Mapping[str, int] = {server.name: server.cards for server in SERVERS}


def find(name_or_path: str) -> Machine:
    """The machine of that name, or the one in that JSON file; changed as the words after it say.

    Raises:
        OptionError: neither a known name nor a file, or a change that is none.
        FormatError: the file is not a machine.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if name_or_path == THIS_MACHINE:
        return this_machine()
    if os.path.isfile(name_or_path):
        from cotrain_compile.files import load  # needed for files only; presets stay plain data

        return _of_one_device(name_or_path, load(name_or_path, Machine))
    base, *changes = name_or_path.split()
    if changes:
        return replace(_changed(find(base), changes), name=name_or_path)
    known = [*PRESETS, THIS_MACHINE]
    raise OptionError(
        f"no machine named {name_or_path!r} and no such file"
        f"{did_you_mean(name_or_path, known)}; known are {', '.join(known)}, "
        "or a file written by `cotrain-compile calibrate`"
    )


def published_range_s(machine: str, seconds: float) -> tuple[float, float] | None:
    """Between which seconds published steps of the kind lie where `seconds` are predicted.

    `machine` is a name, with changes or not; None for what is no preset: nothing was compared.
    """
    if machine.partition(" ")[0] not in PRESETS:
        return None
    least, most = RANGE
    return least * seconds, most * seconds


def refuse_other_ranks(of_step: int, asked: int | None, machine: str) -> None:
    """Raise `OptionError` where a step of `of_step` ranks is not what is `asked` to be planned.

    Nor may a server, whose name or that with changes is `machine`, have fewer cards.
    """
    if asked is not None and asked != of_step:
        was = "a step of one process" if of_step == 1 else f"the step of {of_step} ranks"
        raise OptionError(
            f"--ranks {asked}: the file has {was}; what ranks exchange is in the step, so trace it "
            f"again with `cotrain-compile trace --ranks {asked}`"
        )
    cards = RANKS.get(machine.split()[0], of_step)
    if of_step > cards:
        raise OptionError(
            f"the step is one of {of_step} ranks and {machine} has {cards} cards; give the "
            "network between several such servers, as 'h100 network=50GB'"
        )


def _of_one_device(path: str, machine: Machine) -> Machine:
    if not machine.has_one_device:
        raise OptionError(
            f"{path}: a plan is for one device and its host, with the links d2h and h2d; this "
            f"machine has the spaces {', '.join(machine.spaces)} and the links "
            f"{', '.join(machine.links) or 'none'}; plan for one of its devices, as "
            "machine_devices.seen_from(machine, device) has it, or for all of them with "
            "`cotrain-compile cluster`"
        )
    return machine


def with_changes(name: str, **sizes: str | None) -> str:
    """`name` followed by those of `CHANGES` that are given, for `find`."""
    told = [f"{key.replace('_', '-')}={''.join(s.split())}" for key, s in sizes.items() if s]
    return " ".join([name, *told])


def _changed(machine: Machine, changes: Sequence[str]) -> Machine:
    for change in changes:
        key, equals, size = change.partition("=")
        if key not in CHANGES or not equals:
            raise OptionError(
                f"{change!r} after a machine's name is none of {', '.join(CHANGES)} with =SIZE"
            )
        machine = CHANGES[key](machine, _bytes(key, size))
    source = f"{machine.source} Changed by hand: {', '.join(changes)}.".strip()
    return machine.but(source=source)


def _bytes(what: str, size: str) -> int:
    try:
        nbytes = Size.parse(size).nbytes
    except ValueError as error:
        raise OptionError(f"{what} is {size!r}, but must be {error}") from None
    if nbytes is None:
        raise OptionError(f"{what} is {size!r}, but must be bytes, as '192GiB'")
    return nbytes


def _link(machine: Machine, bytes_per_s: int) -> Machine:
    """Both directions at that rate."""
    h2d, d2h = (replace(way, bytes_per_s=bytes_per_s) for way in (machine.h2d, machine.d2h))
    return machine.but(h2d=h2d, d2h=d2h)


# What may follow a machine's name. A rate is a size a second.
CHANGES: Mapping[str, Callable[[Machine, int], Machine]] = {
    "device-memory": lambda m, size: m.but(device=replace(m.device, capacity_bytes=size)),
    "host-memory": lambda m, size: m.but(host=replace(m.host, capacity_bytes=size)),
    "link": _link,
    "network": lambda m, size: m.but(network=Network(size, _ROUND_S)),
}


def this_machine() -> Machine:
    """A cautious guess at this computer with an emulated device, from its cores and its memory.

    Host and device share the cores and split the memory. Rates are what one core of any recent
    server does at least; `cotrain-compile calibrate` replaces them with measured ones.
    """
    cores, memory_bytes = usable_core_count(), usable_memory_bytes()
    half = TierSpec(
        capacity_bytes=memory_bytes // 2,
        bytes_per_s=min(5 * _GB * cores, 50 * _GB),
        flops_per_s={"float32": 20 * _GB * cores},
        launch_s=10e-6,
    )
    link = Link(4 * _GB, 50e-6)
    return two_tier(
        name=THIS_MACHINE,
        device=half,
        host=half,
        h2d=link,
        d2h=link,
        host_update=HostUpdate(bytes_per_s=half.bytes_per_s, slowdown_while_copying=1.5),
        duplex=1.5,
        source=f"guess from {cores} usable cores and {memory_bytes} bytes of usable memory, "
        "nothing measured; run `cotrain-compile calibrate` for measured figures",
        rates=Rates.GUESSED,
    )
