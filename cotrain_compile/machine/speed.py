"""Machine speed: whether one machine is nowhere slower than another, rate by rate. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from cotrain_compile.machine import HostUpdate, Link, Machine, Network, Processor


def is_nowhere_slower(one: Machine, other: Machine) -> bool:
    """Whether nothing that `other` does takes `one` longer; unknown of several devices, so False.

    What memory they have is not compared.
    """
    if not (one.has_one_device and other.has_one_device):
        return False
    processors = ((p, other.processors[name]) for name, p in one.processors.items())
    links = ((link, other.links[name]) for name, link in one.links.items())
    return (
        all(_works_no_slower(*pair) for pair in processors)
        and all(_carries_no_slower(*pair) for pair in links)
        and one.duplex >= other.duplex
        and _exchanges_no_slower(one.network, other.network)
    )


def _works_no_slower(one: Processor, other: Processor) -> bool:
    alike = (one.fuses_updates, one.runs_ahead) == (other.fuses_updates, other.runs_ahead)
    rates = one.flops_per_s.keys() | other.flops_per_s.keys()
    return (
        alike
        and one.bytes_per_s >= other.bytes_per_s
        and all(_rate(one.flops_per_s, r) >= _rate(other.flops_per_s, r) for r in rates)
        and one.launch_s <= other.launch_s
        and one.issue_s <= other.issue_s
        and one.factors == other.factors
        and _updates_no_slower(one.update, other.update)
    )


def _rate(flops_per_s: Mapping[str, float], dtype: str) -> float:
    return flops_per_s.get(dtype, min(flops_per_s.values()))


def _updates_no_slower(one: HostUpdate | None, other: HostUpdate | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        one.bytes_per_s >= other.bytes_per_s
        and one.workers == other.workers
        and one.slowdown_while_copying <= other.slowdown_while_copying
        and one.seconds_per_element <= other.seconds_per_element
        and one.seconds_per_fresh_byte <= other.seconds_per_fresh_byte
    )


def _carries_no_slower(one: Link, other: Link) -> bool:
    return one.bytes_per_s >= other.bytes_per_s and one.latency_s <= other.latency_s


def _exchanges_no_slower(one: Network | None, other: Network | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        one.bytes_per_s >= other.bytes_per_s
        and one.latency_s <= other.latency_s
        and one.scatter <= other.scatter
    )
