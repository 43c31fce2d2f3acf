"""Plan words: what a plan is called for readers, by the name of the policy that made it.

`greedy+recompute:4` is "greedy choice, recomputing, level 4".
"""

from __future__ import annotations

from collections.abc import Mapping

_WAYS: Mapping[str, str] = {
    "resident": "everything on the device",
    "zero-offload": "ZeRO-Offload's rule",
    "torchao-offload": "torchao's CPUOffloadOptimizer",
    "zero-infinity": "ZeRO-Infinity's rule",
    "zero-infinity-nvme": "ZeRO-Infinity's rule on NVMe",
    "fsdp-offload": "FSDP's CPU offload",
    "coarse": "all updates on the host, early",
    "streamed": "all optimizer states streamed",
    "greedy": "greedy choice",
    "cover": "greedy choice op by op",
    "ilp": "integer program",
    "lp-round": "rounded program",
}
_RECOMPUTED: Mapping[str, str] = {
    "by-region": "recomputing by layer",
    "every-layer": "recomputing every layer",
    "every-other": "recomputing every other layer",
    "checkpoints": "recomputing your checkpoints",
}


def plan_words(policy: str) -> str:
    """`lp-round+recompute:by-region+parts:8` -> "rounded program, recomputing by layer,
    in 8 parts".

    What is not known stays as it is.
    """
    way, *others = policy.split("+")
    name, _, share = way.partition(":")
    told = [_share(share) if name == "fraction" else _WAYS.get(way, way)]
    for each in others:
        kind, _, how = each.partition(":")
        match kind:
            case "recompute" if how.replace(".", "").isdigit():
                told.append(f"recomputing, level {how}")
            case "recompute":
                told.append(_RECOMPUTED.get(how, f"recomputing ({how})"))
            case "parts":
                told.append(f"in {how} parts")
            case "packs":
                told.append("micro-batches breadth first")
            case "cast-once":
                told.append("weights cast once")
            case "head":
                told.append("logits too")
            case "values":
                told.append("and more values")
            case _:
                told.append(each)
    return ", ".join(told)


def named_plan(policy: str) -> str:
    """In words, with the name in brackets by which options and files know it."""
    return f"{plan_words(policy)} ({policy})"


def _share(share: str) -> str:
    return f"{'the best share' if share == 'auto' else f'a share of {share}'} updated on the host"
