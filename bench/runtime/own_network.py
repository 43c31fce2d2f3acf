"""A network of its own: ranks of a benchmark in a network namespace whose loopback is slow.

It needs root, `unshare`, `ip` and `tc`. Every way to train that runs in it shares the network.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def on_own_network(
    module: str, rate: str, arguments: Sequence[str], burst: str = "256kb", mtu: int = 65536
) -> None:
    """Run `python -m module` with `arguments` where the loopback sends `rate`, as tc has it.

    So many bytes as `burst` says go at once, at least a packet of `mtu`. Raises where the system
    allows no such network.
    """
    slow = f"tc qdisc add dev lo root tbf rate {rate} burst {burst} latency 2s"
    script = f'ip link set lo up mtu {mtu} && {slow} && exec "$@"'
    worker = [sys.executable, "-m", module, *arguments]
    subprocess.run(
        ["unshare", "-n", "sh", "-c", script, "sh", *worker],
        check=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
