"""Machines with several devices: made of one with a single device, and seen from each of them.

Device i is space and processor "device<i>", its links are "d2h<i>" and "h2d<i>"; the host is as in
`two_tier`. No torch.
"""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.machine import Machine, SharedPath, Space, Tier, two_tier


def side_by_side(machine: Machine, count: int, *, together: float = 1.0) -> Machine:
    """`count` devices like that of `machine`, with one host whose memory and link they share.

    Copies to several devices get `together` times what one gets (1.0: one link for all; `count`:
    a link for each), and so do copies from several; both directions as `machine.duplex` says.
    """
    if count < 1:
        raise ValueError(f"a machine has at least one device, not {count}")
    names = [f"device{i}" for i in range(count)]
    down, up = ([f"{way}{i}" for i in range(count)] for way in ("d2h", "h2d"))
    device, host = machine.processors[Tier.DEVICE], machine.processors[Tier.HOST]
    paths = [SharedPath(pair, machine.duplex) for pair in zip(down, up, strict=True)]
    if count > 1:
        paths += [SharedPath(tuple(same), together) for same in (down, up)]
        paths.append(SharedPath((*down, *up), machine.duplex * together))
    return Machine(
        name=f"{count} x {machine.name}",
        spaces={
            **{name: Space(machine.device.capacity_bytes) for name in names},
            "host": machine.spaces[Tier.HOST],
        },
        processors={**{name: replace(device, space=name) for name in names}, "host": host},
        links={
            **{a: replace(machine.d2h, source=b) for a, b in zip(down, names, strict=True)},
            **{a: replace(machine.h2d, target=b) for a, b in zip(up, names, strict=True)},
        },
        shared_paths=tuple(paths),
        source=machine.source,
        rates=machine.rates,
        compute_capability=machine.compute_capability,
    ).with_disk(machine.disk)


def seen_from(machine: Machine, device: str, *, crowded: bool = False) -> Machine:
    """The device in space `device` with the host, as a machine of one device.

    Where it is `crowded`, its links have what is left of them while all others are busy.
    """
    down, up = machine.link_between(device, Tier.HOST), machine.link_between(Tier.HOST, device)
    busy = tuple(machine.links) if crowded else ()
    d2h, h2d = (
        replace(link, bytes_per_s=link.bytes_per_s / machine.slowdown(name, busy))
        for name, link in ((down, machine.links[down]), (up, machine.links[up]))
    )
    works = next(p for p in machine.processors.values() if p.space == device)
    update = next(p.update for p in machine.processors.values() if p.space == Tier.HOST)
    if update is None:
        raise ValueError(f"the host of machine {machine.name} says nothing of its updates")
    one = two_tier(
        name=f"{machine.name}, {device}",
        device=machine.tier(device),
        host=machine.tier(Tier.HOST),
        h2d=h2d,
        d2h=d2h,
        host_update=update,
        duplex=2.0 if crowded else _duplex(machine, down, up),
        source=machine.source,
        issue_s=works.issue_s,
        fuses_updates=works.fuses_updates,
        runs_ahead=works.runs_ahead,
        rates=machine.rates,
    )
    return one.but(compute_capability=machine.compute_capability).with_disk(machine.disk)


def _duplex(machine: Machine, down: str, up: str) -> float:
    """What both links reach together while all others are idle, as a multiple of one."""
    paths = (path for path in machine.shared_paths if {down, up} <= set(path.links))
    return min((path.together for path in paths if path.together < 2.0), default=2.0)
