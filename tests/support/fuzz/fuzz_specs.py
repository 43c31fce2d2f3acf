"""Random training programs: a seed in, a `Spec` out, which prints as a program that runs it.

A spec is plain data: a model, optimizers with their groups, a loop, and the options it is placed
with. `shrunk` yields simpler ones, to find what a failure hangs on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cotrain_compile.options.parsers import POLICIES
from tests.support.fuzz.fuzz_edits import GRADIENT_EDITS, PARAMETER_EDITS, UPDATES
from tests.support.fuzz.fuzz_layers import AGAIN, LAYERS
from tests.support.fuzz.fuzz_layouts import LAYOUTS

# Seeds of one campaign that are so far apart are of one case: the program that tries most is run.
APART = 10_000_000


@dataclass(frozen=True)
class ModelSpec:
    """Kinds of layers, see `fuzz_layers`; `dtype` is that of all that say no other."""

    layers: tuple[str, ...]
    width: int = 8
    dtype: str = "float64"
    reads_tokens: bool = False
    tied: bool = False
    classes: int = 10


@dataclass(frozen=True)
class OptimizerSpec:
    """A class of torch.optim; parameter i is in group i modulo their number.

    `flags` say how torch runs it (foreach, fused, capturable), and are left out in eager.
    """

    name: str = "AdamW"
    settings: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ({},)
    flags: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class LoopSpec:
    """How a step is written. `rows` are the batch sizes of the steps, `rates` learning rates.

    `before` and `behind` the update come the edits of `fuzz_edits` of these names; `by_hand` is
    the update that the step has written out in place of an optimizer. Where `masters` is set, the
    optimizer trains wider copies, and with `second` every other parameter has plain momentum.
    """

    rows: tuple[int, ...] = (4, 4, 4, 4)
    rates: tuple[float, ...] = ()
    clip: str = "none"
    micro_batches: int = 1
    autocast: bool = False
    clear: str = "first"
    returns: str = "loss"
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    by_hand: str = ""
    masters: bool = False
    second: bool = False


@dataclass(frozen=True)
class Spec:
    """A program. Shares are of what the step takes with everything resident.

    It is planned or traced in a `way` of `fuzz_ways`, and regions of each kind run in `parts`.
    """

    seed: int
    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    loop: LoopSpec = LoopSpec()
    options: Mapping[str, Any] = field(default_factory=dict)
    device_share: float | None = None
    host_share: float | None = None
    way: str = ""
    parts: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            "from tests.support.fuzz.fuzz_run import run\n"
            "from tests.support.fuzz.fuzz_specs import LoopSpec, ModelSpec, OptimizerSpec, Spec\n\n"
            f"print(run({self!r}))"
        )


def random_spec(seed: int) -> Spec:
    """The program with number `seed`."""
    rng = random.Random(seed)
    loop = _loop(rng)
    edits = _edits(random.Random(f"edits {seed}"))
    model, optimizer, options = _model(rng, loop), _optimizer(rng), _options(rng)
    if optimizer.name == "Rprop":
        # Its steps hang on the sign of a gradient, which bfloat16 rounds to either side of zero.
        loop = replace(loop, autocast=False)
    if edits["by_hand"]:  # what a step without an optimizer is told to set
        options["keep_grads"] = True
    return Spec(
        seed,
        model,
        optimizer,
        replace(loop, **edits),
        options,
        device_share=rng.choice([None, rng.uniform(0.2, 1.2), rng.uniform(0.6, 1.0)]),
        host_share=rng.choice([None, None, None, rng.uniform(0.0, 2.0)]),
    )


def with_layouts(seed: int) -> Spec:
    """As `random_spec`, with layers of `fuzz_layouts`; every other one is compiled, and small."""
    rng, spec = random.Random(f"layouts {seed}"), random_spec(seed)
    odd = rng.sample([*LAYOUTS], rng.randint(1, 3))
    if seed % 2 == 0:
        layers = list(spec.model.layers)
        for kind in odd:
            layers.insert(rng.randint(0, len(layers)), kind)
        options = {**spec.options, "lowering": "eager"}
        return replace(spec, model=replace(spec.model, layers=_begun(layers)), options=options)
    layers = [*odd[:1], *rng.sample(spec.model.layers, min(1, len(spec.model.layers)))]
    rng.shuffle(layers)
    return replace(
        spec,
        model=replace(spec.model, layers=_begun(layers)),
        loop=replace(spec.loop, rows=(4, 4, 4), rates=spec.loop.rates[:3]),
        options={**spec.options, "lowering": "inductor", "verify": 0},
        # So small a step takes hardly less than it takes resident: most would be refused.
        device_share=rng.choice([None, None, 1.5]),
        host_share=None,
    )


def _begun(layers: Sequence[str]) -> tuple[str, ...]:
    """There is a first layer before it is used again."""
    return ("linear", *layers) if layers[0] == AGAIN else tuple(layers)


def _model(rng: random.Random, loop: LoopSpec) -> ModelSpec:
    kinds = [*LAYERS, AGAIN, AGAIN]
    layers = tuple(rng.choice(kinds) for _ in range(rng.randint(0, 6)))
    if layers[:1] == (AGAIN,):
        layers = ("linear", *layers)
    dtype = "float64" if rng.random() < 0.6 else "float32"
    if loop.autocast:
        dtype = "float32"
    reads_tokens = rng.random() < 0.4
    return ModelSpec(
        layers,
        width=rng.choice([4, 8, 16, 64]),
        dtype=dtype,
        reads_tokens=reads_tokens,
        tied=reads_tokens and rng.random() < 0.5,
    )


# A large eps keeps Adam and its like from making whole updates of rounding.
_SOFT = {"eps": 1e-2}
_OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [_SOFT, {**_SOFT, "amsgrad": True}, {**_SOFT, "betas": (0.5, 0.8), "maximize": True}],
    "Adam": [_SOFT, {**_SOFT, "weight_decay": 0.1}, {**_SOFT, "decoupled_weight_decay": True}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "RMSprop": [_SOFT, {**_SOFT, "momentum": 0.9, "centered": True}],
    "Adagrad": [_SOFT, {**_SOFT, "lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adadelta": [_SOFT, {**_SOFT, "rho": 0.5, "maximize": True}],
    "Adamax": [_SOFT, {**_SOFT, "weight_decay": 0.1}],
    "NAdam": [_SOFT, {**_SOFT, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [_SOFT, {**_SOFT, "weight_decay": 0.1}],
    "ASGD": [{}, {"weight_decay": 0.1, "t0": 2}],
    "Rprop": [{}, {"step_sizes": (1e-6, 1e-2)}],
    "Adafactor": [{}, {"weight_decay": 0.1}],
}
_FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
_CAPTURABLE_ALONE = ("RAdam", "ASGD")


def _optimizer(rng: random.Random) -> OptimizerSpec:
    name = rng.choice([*_OPTIMIZERS, "AdamW", "AdamW", "Adam", "SGD"])
    settings = dict(rng.choice(_OPTIMIZERS[name]))
    groups: list[dict[str, Any]] = [{}]
    for _ in range(rng.choice([0, 0, 1, 2])):
        groups.append({"lr": rng.choice([0.0, 1e-4, 0.02]), "weight_decay": rng.choice([0.0, 0.2])})
    flags: dict[str, bool] = {}
    if name != "Adafactor" or rng.random() < 0.5:
        flags = rng.choice([{}, {"foreach": True}, {"foreach": False}])
    if name in _FUSED and rng.random() < 0.2:
        flags = {"fused": True}
    if name in _CAPTURABLE_ALONE and rng.random() < 0.8:
        flags = {**flags, "capturable": True}
    return OptimizerSpec(name, settings, tuple(groups), flags)


def _loop(rng: random.Random) -> LoopSpec:
    rows = rng.choice([(4,) * 6, (4,) * 6, (4,) * 6, (4, 4, 8, 4, 8), (6, 4, 4, 8, 2), (2,) * 4])
    return LoopSpec(
        rows,
        rates=rng.choice([(), (), (), (1e-3, 5e-3, 2e-3, 1e-3, 3e-3)]),
        clip=rng.choice(["none", "none", "norm", "norm", "infinity norm", "value"]),
        micro_batches=rng.choice([1, 1, 1, 2, 2]),
        autocast=rng.random() < 0.2,
        clear=rng.choice(["first", "first", "last", "zeros"]),
        returns=rng.choice(["loss", "loss", "item", "dictionary", "tuple", "nothing"]),
    )


def _edits(rng: random.Random) -> dict[str, Any]:
    """What a loop does to gradients and parameters, and how it updates: often nothing special."""
    kinds = [(), (), *((name,) for name in GRADIENT_EDITS)]
    behind = [(), (), *((name,) for name in PARAMETER_EDITS)]
    several = rng.random() < 0.3
    return {
        "before": tuple(rng.sample([*GRADIENT_EDITS], 2)) if several else rng.choice(kinds),
        "behind": tuple(rng.sample([*PARAMETER_EDITS], 2)) if several else rng.choice(behind),
        "by_hand": rng.choice(["", "", "", "", *UPDATES]),
        "masters": rng.random() < 0.1,
        "second": rng.random() < 0.15,
    }


def _options(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, list[Any]] = {
        "policy": [*POLICIES[1:9], "fraction:0.3", "fraction:1", *["auto"] * 6, "ilp", "streamed"],
        "host_kernels": ["captured", "captured", "fused"],
        "overlap_steps": [False, True],
        "remat": [False, False, True],
        "verify": [0, 0, 0, 2],
        "keep_grads": [False, False, False, True],
        "throttle": [False, False, False, True],
        "poison": [True, True, False],
        "solver": ["highs", "highs", "cbc"],
        "seed": [0, 7],
        "live": [False, False, False, 0.01],
        "machine": ["this-machine", "this-machine", "rtx4090"],
        "lowering": ["eager"] * 14 + ["inductor"],
    }
    options = {name: rng.choice(values) for name, values in choices.items()}
    if options["lowering"] == "inductor":
        options["verify"] = 0
    return {**options, "work_limit": 2.0, "quiet": True}


# Simpler programs.


def shrunk(spec: Spec) -> Iterator[Spec]:
    """Programs that differ from `spec` in one thing, which is simpler."""
    model, layers = spec.model, spec.model.layers
    for i in range(len(layers)):
        yield replace(spec, model=replace(model, layers=layers[:i] + layers[i + 1 :]))
    for changed in _plainer(model, ModelSpec(layers)):
        yield replace(spec, model=changed)
    for optimizer in _plainer(spec.optimizer, OptimizerSpec()):
        yield replace(spec, optimizer=optimizer)
    for loop in _plainer(spec.loop, LoopSpec()):
        yield replace(spec, loop=loop)
    for name in spec.options.keys() - {"quiet"}:
        left = {key: value for key, value in spec.options.items() if key != name}
        yield replace(spec, options=left)
    if spec.parts:
        yield replace(spec, way="", parts={})
    if spec.device_share is not None:
        yield replace(spec, device_share=None)
    if spec.host_share is not None:
        yield replace(spec, host_share=None)


_Part = TypeVar("_Part", ModelSpec, OptimizerSpec, LoopSpec)


def _plainer(part: _Part, plain: _Part) -> Iterator[_Part]:
    """`part` with one of its fields as in `plain`."""
    for name, value in vars(plain).items():
        if getattr(part, name) != value:
            yield replace(part, **{name: value})
