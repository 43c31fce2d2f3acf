"""Match: which part of a host region is the optimizer's own update, and what is left beside it.

In: a region, what its inputs are, and its optimizer's rule. Out: the gradient that the rule starts
from, and which nodes hold the new parameter and states that it ends in, each the very function that
the rule is (`terms`), over the real numbers: in a narrow dtype only where eager rounds as the loop
does (`optimizer_loops`). The ops before the gradient and behind the new values are no part of the
update, and stay as they are captured. No match: some op between the two is not accounted for.

    %mul(%grad, %clip)  ->  before     %fma, %lerp, ...  ->  the update     %clamp_min  ->  behind

Update rules: what each of ATen's fused loops computes, as terms, from its source.

A rule gives, for the settings at hand, the new value of the parameter and of each state, by the
same names as the tensors that the loop takes. Where torch's own optimizer computes the same in more
than one way, a rule has more than one spelling; `docs/replacements.md` says what they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cotrain_compile.extract.optimizer_loops import WIDE, rounds_as_eager
from cotrain_compile.graph import OptimizerRule, writes
from cotrain_compile.runtime.host.live_settings import value_of
from cotrain_compile.runtime.host.terms import Term, Terms, region_terms

COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Match:
    """The update in a region: `gradient` is what it starts from.

    `new` has the input that each node behind the update finds its value in, once that is written;
    `skip` is the input that says whether the update is left out, None where there is none.
    """

    gradient: fx.Node
    new: Mapping[fx.Node, fx.Node]
    skip: fx.Node | None


def match_update(
    region: fx.GraphModule,
    rule: OptimizerRule,
    tensors: Mapping[str, fx.Node],
    live: Mapping[str, fx.Node],
) -> Match | None:
    """The update by `rule` in `region`, None where there is none that accounts for every op.

    `tensors` are the inputs that are the parameter ("param") and its states, by name, and `live`
    those that are settings.
    """
    param = tensors.get("param")
    if rule.optimizer not in UPDATE_RULES or param is None:
        return None
    if not rounds_as_eager(rule, param.meta["val"].dtype):
        return None
    if reads_what_is_overwritten(region.graph):
        return None
    written = {to for _, to, _ in writes(region.graph)}
    if not written.issuperset(tensors.values()):
        return None
    for gradient in _candidates(region.graph, tensors):
        for match in _matches(region, rule, tensors, live, gradient):
            if _all_copies_are_kept(region.graph, match):
                return match
    return None


def _candidates(graph: fx.Graph, tensors: Mapping[str, fx.Node]) -> list[fx.Node]:
    """What may be the gradient, the likeliest first: it depends on no state, and hardly on the
    parameter. The last such value comes first: most of what is done to it is done as captured.
    """
    own = tensors["param"].meta["val"]
    of_param = descendants(graph, [tensors["param"]])
    of_states = descendants(graph, [node for name, node in tensors.items() if name != "param"])
    found: tuple[list[fx.Node], list[fx.Node]] = ([], [])
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        if node in of_states or node.target is COPY or not isinstance(value, torch.Tensor):
            continue
        if value.dtype == own.dtype and value.shape == own.shape and node is not tensors["param"]:
            found[node in of_param].append(node)
    return found[0] + found[1]


def _matches(
    region: fx.GraphModule,
    rule: OptimizerRule,
    tensors: Mapping[str, fx.Node],
    live: Mapping[str, fx.Node],
    gradient: fx.Node,
) -> Iterator[Match]:
    """A match for each spelling of the rule, and for each flag that may skip it."""
    terms = Terms()
    named = {name: _leaf(terms, name, node) for name, node in tensors.items()}
    leaves = {node: named[name] for name, node in tensors.items()}
    leaves |= {n: terms.leaf(("setting", k), is_scalar=True) for k, n in live.items()}
    leaves[gradient] = terms.leaf("gradient")
    given = Given(terms, {**named, "gradient": leaves[gradient]}, rule.settings, live)
    spellings = [new for new in UPDATE_RULES[rule.optimizer](given) if new.keys() == named.keys()]
    for skip in (None, *_flags(region.graph)):
        # What the region computes where the flag is not set, and where it is: the old values.
        taken, skipped = (
            region_terms(region, terms, leaves | _set(terms, skip, flag), tensors["param"])
            for flag in (0.0, 1.0)
        )
        for new in spellings:
            ends = {tensors[name]: (term, named[name]) for name, term in new.items()}
            holders = {
                node: tensor
                for node, tensor in _holders(region.graph, taken, ends)
                if skip is None or skipped[node] == ends[tensor][1]
            }
            if set(holders.values()) == set(ends):
                yield Match(gradient, holders, skip)


def _set(terms: Terms, flag: fx.Node | None, value: float) -> dict[fx.Node, Term]:
    return {} if flag is None else {flag: terms.of(value)}


def _leaf(terms: Terms, name: str, node: fx.Node) -> Term:
    is_count = name == "step" and not node.meta["val"].dim() and node.meta["val"].dtype in WIDE
    return terms.leaf(name, is_scalar=is_count)


def _flags(graph: fx.Graph) -> list[fx.Node]:
    """Inputs that decide between an old value and a new one."""
    choices = graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    flags = dict.fromkeys(choice.args[0] for choice in choices)
    return [
        flag
        for flag in flags
        if isinstance(flag, fx.Node) and flag.op == "placeholder" and flag.meta["val"].numel() == 1
    ]


def _holders(
    graph: fx.Graph, found: Mapping[fx.Node, Term], ends: Mapping[fx.Node, tuple[Term, Term]]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each node that holds a new value of `ends`, with the input that it is the new value of."""
    of_term = {new: tensor for tensor, (new, _) in ends.items()}
    for node in graph.nodes:
        tensor = of_term.get(found[node]) if node.op == "call_function" else None
        if tensor is not None and (node.target is not COPY or node.args[0] is tensor):
            yield node, tensor


def _all_copies_are_kept(graph: fx.Graph, match: Match) -> bool:
    """Whether each write is the update's, or of an op before or behind it; and none in between.

    What comes before must leave the parameter and states as they are.
    """
    before, inside = ancestors(match.gradient), set[fx.Node]()
    for node in match.new:
        inside |= ancestors(node)
    tensors = set(match.new.values())
    for write, to, _ in writes(graph):
        if write in before and to in tensors:
            return False
        if write in inside and write not in before and write not in match.new:
            return False
    return True


def descendants(graph: fx.Graph, sources: Sequence[fx.Node]) -> set[fx.Node]:
    """`sources` and all that is computed from them."""
    found = set(sources)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def ancestors(node: fx.Node) -> set[fx.Node]:
    """`node` and all that it is computed from."""
    found, queue = {node}, [node]
    for reached in queue:  # grows while it is read
        queue += [source for source in reached.all_input_nodes if source not in found]
        found.update(reached.all_input_nodes)
    return found


def reads_what_is_overwritten(graph: fx.Graph) -> bool:
    """Whether an op reads an input as such after it is written: its order would matter then."""
    written: set[Any] = set()
    for node in graph.nodes:
        reads: Sequence[Any] = node.args[1:] if node.target is COPY else node.all_input_nodes
        if not written.isdisjoint(reads):
            return True
        if node.target is COPY:
            written.add(node.args[0])
    return False


New = Mapping[str, Term]


class Given:
    """What a rule starts from: tensors by name, "gradient" too, and settings.

    A setting is a constant, or a leaf where it is an input of the step.
    """

    def __init__(
        self, terms: Terms, tensors: Mapping[str, Term], settings: Mapping[str, Any], live: Any
    ) -> None:
        self.terms, self._tensors = terms, tensors
        self._settings, self._live = settings, live

    def __getitem__(self, name: str) -> Term:
        return self._tensors[name]

    def has(self, setting: str) -> bool:
        """Whether a setting is neither false nor zero, as the optimizer asks while it is traced."""
        return bool(value_of(self._settings, setting))

    def setting(self, name: str) -> Term:
        if name in self._live:
            return self.terms.leaf(("setting", name), is_scalar=True)
        return self.terms.of(float(value_of(self._settings, name)))


def _gradient(given: Given, *, decays: bool = True) -> Term:
    """With what every loop does to it first."""
    gradient = -given["gradient"] if given.has("maximize") else given["gradient"]
    if decays and given.has("weight_decay"):
        return gradient + given.setting("weight_decay") * given["param"]
    return gradient


def _adam(given: Given) -> Iterator[New]:
    lr, eps, one = given.setting("lr"), given.setting("eps"), given.terms.of(1.0)
    beta1, beta2 = given.setting("betas.0"), given.setting("betas.1")
    is_decoupled = given.has("decoupled_weight_decay")
    gradient = _gradient(given, decays=not is_decoupled)
    param = given["param"]
    if is_decoupled and given.has("weight_decay"):
        param = param * (one - lr * given.setting("weight_decay"))
    step, old = given["step"] + 1.0, given["exp_avg"]
    average = old + (one - beta1) * (gradient - old)
    square = beta2 * given["exp_avg_sq"] + (one - beta2) * (gradient * gradient)
    new, largest = {"step": step, "exp_avg": average, "exp_avg_sq": square}, square
    if given.has("amsgrad"):
        largest = new["max_exp_avg_sq"] = given.terms.maximum(given["max_exp_avg_sq"], square)
    step_size = lr / (one - beta1**step)
    scale = (one - beta2**step) ** 0.5
    yield {**new, "param": param - step_size * (average / (largest**0.5 / scale + eps))}
    # As with `capturable`: the step size is divided into the denominator.
    below = largest**0.5 / (scale * -step_size) + eps / -step_size
    yield {**new, "param": param + average / below}


def _sgd(given: Given) -> Iterator[New]:
    gradient = _gradient(given)
    if not given.has("momentum"):
        yield {"param": given["param"] - given.setting("lr") * gradient}
        return
    momentum, one = given.setting("momentum"), given.terms.of(1.0)
    moved = momentum * given["momentum_buffer"] + (one - given.setting("dampening")) * gradient
    change = gradient + momentum * moved if given.has("nesterov") else moved
    param = given["param"] - given.setting("lr") * change
    yield {"param": param, "momentum_buffer": moved}


def _adagrad(given: Given) -> Iterator[New]:
    gradient, step = _gradient(given), given["step"] + 1.0
    step_size = given.setting("lr") / (1.0 + (step - 1.0) * given.setting("lr_decay"))
    total = given["sum"] + gradient * gradient
    param = given["param"] - step_size * (gradient / (total**0.5 + given.setting("eps")))
    yield {"step": step, "sum": total, "param": param}


# By exact class, as the loops in `fused_loops` are.
UPDATE_RULES: Mapping[type, Callable[[Given], Iterator[New]]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}
