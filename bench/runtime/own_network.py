"""A network of its own: ranks of a benchmark in a network namespace, where sending is slow.

Either all ranks share a loopback, or each has a network card at a hub, which receives as fast as it
sends whatever others do. Both need root, `unshare`, `ip` and `tc`; cards `nsenter` as well.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000  # sched.h
_MTU = 9000


@dataclass(frozen=True)
class Loopback:
    """It sends `rate`, as tc has it; as many bytes as `burst` says at once."""

    rate: str
    burst: str = "256kb"

    @property
    def made(self) -> str:
        """The shell commands that make it."""
        slow = f"tc qdisc add dev lo root {_slow(self.rate, self.burst)}"
        return f"ip link set lo up mtu 65536 && {slow}"


HUB = f"ip link add hub type bridge && ip link set hub mtu {_MTU} up && ip link set lo up"


def on_own_network(module: str, arguments: Sequence[str], made: str) -> None:
    """Run `python -m module` with `arguments` on the network that the shell commands `made` make.

    Raises where the system allows no such network.
    """
    worker = [sys.executable, "-m", module, *arguments]
    subprocess.run(
        ["unshare", "-n", "sh", "-c", f'{made} && exec "$@"', "sh", *worker],
        check=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )


def take_card(rank: int, rate: str) -> None:
    """Leave the namespace of the process that has started this one, for one with a card at its hub.

    The card sends and receives `rate`. To be called before there is any other thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace for this rank")
    card, port = "card", f"port{os.getpid()}"
    _sh(
        f"ip link add {port} mtu {_MTU} type veth peer name {card} mtu {_MTU} netns {os.getpid()}"
        f" && ip link set {port} master hub up"
        f" && tc qdisc add dev {port} root {_slow(rate)}",
        ("nsenter", "-t", str(os.getppid()), "-n"),
    )
    _sh(
        f"ip link set lo up && ip addr add 10.0.0.{rank + 1}/24 dev {card}"
        f" && ip link set {card} up && tc qdisc add dev {card} root {_slow(rate)}"
    )
    os.environ["GLOO_SOCKET_IFNAME"] = card


def _slow(rate: str, burst: str = "16kb") -> str:
    return f"tbf rate {rate} burst {burst} latency 2s"


def _sh(script: str, within: Sequence[str] = ()) -> None:
    subprocess.run([*within, "sh", "-c", script], check=True)
