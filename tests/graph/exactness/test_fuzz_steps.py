"""Random training programs: placed they compute what the captured step does, or are refused.

What holds for each is in `fuzz_run`; `bench.reliability.fuzz` runs programs by the clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from tests.support.closeness import gap
from tests.support.fuzz.fuzz_checks import allowed_graphs, checked_refusal
from tests.support.fuzz.fuzz_compare import Broken, Left, compare, nudge
from tests.support.fuzz.fuzz_coverage import figures, newest, tried_by
from tests.support.fuzz.fuzz_edits import GRADIENT_EDITS, PARAMETER_EDITS, UPDATES
from tests.support.fuzz.fuzz_layers import AGAIN, LAYERS
from tests.support.fuzz.fuzz_layouts import LAYOUTS
from tests.support.fuzz.fuzz_run import run
from tests.support.fuzz.fuzz_specs import (
    LoopSpec,
    ModelSpec,
    OptimizerSpec,
    Spec,
    random_spec,
    shrunk,
)
from tests.support.fuzz.fuzz_ways import (
    ALIKE,
    FIRST_IN_WAYS,
    IN_PARTS,
    ON_DISK,
    REPEATED,
    campaign_spec,
    forced,
)
from tests.support.steps import cotrain

IN_CI = (*(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 3, 4, 6, 140123)), 140008)
WITHOUT_EDITS = (0, 6)  # of gradients and parameters, as the plain loops of most steps
TIGHT = {"policy": "auto", "host_kernels": "captured", "quiet": True}


@pytest.mark.usefixtures("one_thread", "watchdog")
@pytest.mark.parametrize("seed", IN_CI)
def test_a_random_program_keeps_every_promise(seed: int) -> None:
    spec = random_spec(seed)
    if seed in WITHOUT_EDITS:
        spec = replace(spec, loop=replace(spec.loop, before=(), behind=()))
    assert run(spec).status == "equal"


def test_a_program_is_printed_as_one_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = Spec(3, ModelSpec(()), loop=LoopSpec(rows=(2, 2)), options={**TIGHT, "policy": "coarse"})
    exec(str(spec), {})
    assert capsys.readouterr().out.startswith("Outcome(status='equal'")


def test_the_same_seed_gives_the_same_program() -> None:
    assert random_spec(11) == random_spec(11)
    assert len({repr(random_spec(seed)) for seed in range(50)}) == 50


def test_the_programs_have_every_layer_optimizer_and_way_to_write_a_loop() -> None:
    specs = [random_spec(seed) for seed in range(600)]
    assert {kind for spec in specs for kind in spec.model.layers} == {*LAYERS, AGAIN}
    assert len({spec.optimizer.name for spec in specs}) == 12
    assert {spec.loop.clear for spec in specs} == {"first", "last", "zeros"}
    assert {flag for spec in specs for flag in spec.optimizer.flags} == {
        "foreach",
        "fused",
        "capturable",
    }
    assert {name for spec in specs for name in spec.loop.before} == {*GRADIENT_EDITS}
    assert {name for spec in specs for name in spec.loop.behind} == {*PARAMETER_EDITS}
    assert {spec.loop.by_hand for spec in specs} == {"", *UPDATES}


def test_programs_of_a_campaign_have_every_layout_and_half_of_them_are_compiled() -> None:
    specs = [campaign_spec(seed) for seed in range(200)]
    assert {*LAYOUTS} <= {kind for spec in specs for kind in spec.model.layers}
    compiled = [spec.options["lowering"] == "inductor" for spec in specs]
    assert compiled == [False, True] * 100


def test_programs_of_later_campaigns_are_in_every_way() -> None:
    specs = [campaign_spec(FIRST_IN_WAYS + seed) for seed in range(400)]
    assert {spec.way for spec in specs} == {"", IN_PARTS, ALIKE, ON_DISK}
    alike = {kind for spec in specs for kind in spec.model.layers if spec.way == ALIKE}
    assert {*REPEATED} <= alike
    assert any(
        spec.parts and spec.options["micro_batch_order"] == "by-layer" and spec.loop.micro_batches
        for spec in specs
    )
    on_disk = [spec.options for spec in specs if spec.way == ON_DISK]
    assert {options["overlap_steps"] for options in on_disk} == {False, True}
    compiled = [spec.options["lowering"] == "inductor" for spec in specs]
    assert compiled == [False, True] * 200


WAYS = {
    IN_PARTS: Spec(
        1,
        ModelSpec(("residual", "prelu"), 16, "float32", classes=96),
        loop=LoopSpec((8, 8), micro_batches=2),
    ),
    ALIKE: Spec(1, ModelSpec(("checkpointed dropout",) * 6), loop=LoopSpec((4, 4))),
    ON_DISK: Spec(1, ModelSpec(("residual",) * 2, 64, "float32"), loop=LoopSpec((4, 4))),
}


@pytest.mark.usefixtures("one_thread", "watchdog")
@pytest.mark.parametrize(
    "way", [IN_PARTS, *(pytest.param(n, marks=pytest.mark.long) for n in (ALIKE, ON_DISK))]
)
def test_a_program_takes_its_way_and_keeps_every_promise(way: str) -> None:
    """What may be drawn beside it is drawn by campaigns."""
    options = {**TIGHT, "policy": "zero-offload", "plan_cache": False}
    spec = replace(WAYS[way], way=way, options=options)
    if way == IN_PARTS:
        spec = replace(spec, parts={"loss": 2, "mlp": 2})
    if way == ON_DISK:
        on_disk = {"machine": "rtx4090", "host_kernels": "fused", "overlap_steps": True}
        spec = replace(spec, options=options | on_disk, host_share=0.8)
    outcome = run(spec)
    assert (outcome.status, outcome.way) == ("equal", way)


@pytest.mark.parametrize("way", [IN_PARTS, ALIKE, ON_DISK])
def test_what_a_way_takes_hold_of_is_still_there(way: str) -> None:
    """Names in the program that are replaced: one that is gone ends each of its cases."""
    with forced(replace(WAYS[way], way=way, parts={"loss": 2})) as found:
        assert ("disk" in found.options) == (way == ON_DISK)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_layer_of_any_layout_is_trained(kind: str) -> None:
    for width in (4, 16):
        assert tried_by(Spec(1, ModelSpec((kind,), width=width)))


def test_of_some_programs_the_one_is_chosen_that_tries_what_was_tried_least() -> None:
    plain, normed = (Spec(1, ModelSpec(layers)) for layers in ((), ("batch norm of rows",)))
    tried = tried_by(normed)
    assert "native_batch_norm" in tried
    assert "transpose* > native_batch_norm" in tried
    assert newest([plain, normed], Counter()) == (normed, tried)
    other = Spec(1, ModelSpec(("windows",)))
    often = Counter(dict.fromkeys(tried, 100))
    assert newest([normed, other], often)[0] == other
    assert figures(Counter(["mm", "mm", "t* > mm", "mm > add"])) == {
        "ops": {"mm": 2},
        "pairs": 2,
        "pairs_with_odd_layouts": 1,
        "pairs_tried_once": 2,
    }


def test_a_simpler_program_differs_in_one_thing() -> None:
    spec = random_spec(12)
    simpler = list(shrunk(spec))
    assert simpler
    assert spec not in simpler
    optimizer = replace(spec, optimizer=replace(spec.optimizer, name="AdamW"))
    assert optimizer in simpler or spec.optimizer.name == "AdamW"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [(1e-12, "w differs in some bit"), (float("nan"), "w differs"), (None, "have other tensors")],
)
def test_a_difference_is_named(change: float | None, complaint: str) -> None:
    w = torch.ones(3, dtype=torch.float64)
    found = Left(tensors={} if change is None else {"w": w + change})
    with pytest.raises(Broken, match=complaint):
        compare(Left(tensors={"w": w}), found, "two runs", 0)


@pytest.mark.parametrize("allowed", [0.0, 0.1, float("inf")])
def test_a_difference_is_broken_unless_eager_itself_is_as_far_apart(allowed: float) -> None:
    eager, captured = Left(tensors={"w": torch.ones(2)}), Left(tensors={"w": torch.full((2,), 1.3)})

    def check() -> None:
        compare(eager, captured, "two runs", 1e-3, lambda: {"w": allowed})

    if allowed > 0.3:
        check()
    else:
        with pytest.raises(Broken, match=r"w is .* are 0\.3 apart, rounding explains"):
            check()


def test_what_is_a_number_in_one_run_only_is_infinitely_far_away() -> None:
    inf, nan = float("inf"), float("nan")
    assert gap(torch.tensor([nan, inf, 3.0]), torch.tensor([nan, inf, 5.0])) == 2
    assert gap(torch.tensor([nan, 1.0]), torch.tensor([0.0, 1.0])) == inf
    assert gap(torch.tensor([inf]), torch.tensor([-inf])) == inf
    assert gap(torch.tensor([]), torch.tensor([])) == 0


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (torch.full((4,), 9e-6), torch.zeros(4)),  # second moments
        (torch.zeros(4), torch.full((4,), 1e-12)),
        (torch.tensor([5, 200], dtype=torch.uint8), torch.tensor([6, 200], dtype=torch.uint8)),
    ],
)
def test_small_tensors_and_whole_numbers_are_told_apart(expected: Tensor, found: Tensor) -> None:
    left = Left(tensors={"w": expected})
    compare(left, left, "a run and itself", 0.1)
    with pytest.raises(Broken, match="w "):
        compare(left, Left(tensors={"w": found}), "two runs", 0.1)


def test_a_number_of_pythons_is_compared_as_wide_as_it_is() -> None:
    with pytest.raises(Broken, match="result 0 is"):
        compare(Left(returned=[1.0]), Left(returned=[1.0 + 1e-9]), "two runs", 1e-12)


def test_a_nudged_parameter_is_its_own_neighbour() -> None:
    model = torch.nn.Linear(40, 1)
    before = model.weight.detach().clone()
    nudge(model, seed=0)
    steps = (model.weight.detach().view(torch.int32) - before.view(torch.int32)).abs()
    assert set(steps.flatten().tolist()) == {0, 1}


@pytest.mark.usefixtures("one_thread", "watchdog")
def test_only_the_program_alone_may_say_that_its_time_was_too_short() -> None:
    late = PlanError("the solver found no plan within its limit, though there is one")
    for policy in ("ilp", "lp-round"):
        assert checked_refusal(late, {"policy": policy}).startswith("PlanError")
    for error, policy in ((late, "auto"), (PlanError("unsound plan"), "ilp")):
        with pytest.raises(Broken, match="refused by PlanError"):
            checked_refusal(error, {"policy": policy})


@pytest.mark.long
def test_a_program_that_leans_on_roundings_is_measured_by_its_own() -> None:
    """Behind a batch norm over two equal rows a gradient is the rounding of two that cancel."""
    layers = ("batch norm", "unused parameter", "group norm", "linear", "linear")
    model = ModelSpec(layers, width=64, dtype="float32", reads_tokens=True, tied=True)
    adadelta = OptimizerSpec(
        "Adadelta",
        {"eps": 0.01, "rho": 0.5, "maximize": True},
        groups=({}, {"lr": 0.02, "weight_decay": 0.0}, {"lr": 0.0001, "weight_decay": 0.2}),
    )
    loop = LoopSpec((4,) * 6, micro_batches=2)
    assert run(Spec(20255, model, adadelta, loop, options=TIGHT)).status == "equal"


@pytest.mark.parametrize(
    "name",
    [
        "RAdam",
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in ("AdamW", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam")
        ),
    ],
)
def test_captured_steps_are_those_of_eager_with_corrections_in_float32(name: str) -> None:
    """`run` holds them to 1e-12; with eager's own corrections most are 1e-8 apart and more."""
    flags = {"capturable": True} if name in ("RAdam", "ASGD") else {}
    options = {**TIGHT, "policy": "resident"}
    spec = Spec(1, ModelSpec(("linear",)), OptimizerSpec(name, flags=flags), options=options)
    assert run(spec).status == "equal"


@pytest.mark.long
@pytest.mark.usefixtures("one_thread", "watchdog")
def test_a_program_that_leans_on_corrections_is_compared_with_the_same_ones() -> None:
    """A batch norm over two rows makes 4e-5 of the 1.3e-5 that they are apart in the first step."""
    layers = ("view", "batch norm", "dropout", "residual", "empty parameter")
    model = ModelSpec(layers, width=64, reads_tokens=True, tied=True)
    adam = OptimizerSpec(
        "Adam",
        {"eps": 0.01, "decoupled_weight_decay": True},
        groups=({}, {"lr": 0.0, "weight_decay": 0.2}, {"lr": 0.02, "weight_decay": 0.2}),
    )
    for kernels in ("captured", "fused"):
        options = {**TIGHT, "policy": "zero-offload", "host_kernels": kernels}
        spec = Spec(70019, model, adam, LoopSpec((2,) * 4, clear="last"), options=options)
        assert run(spec).status == "equal"


@pytest.mark.parametrize(
    ("loop", "graphs"),
    [
        (LoopSpec(rows=(4, 4)), 1),
        (LoopSpec(rows=(6, 4, 8)), 2),
        (LoopSpec(rows=(2, 2), micro_batches=2), 1),
        (LoopSpec(rows=(6, 4, 8, 2), micro_batches=2), 3),
        (LoopSpec(rows=(4, 8, 4), micro_batches=2), 2),
        (LoopSpec(rows=(4, 8, 4), rates=(1e-3, 1e-2, 1e-3), clear="zeros"), 4),
    ],
)
def test_a_batch_of_one_row_is_a_graph_of_its_own(loop: LoopSpec, graphs: int) -> None:
    assert allowed_graphs(Spec(0, ModelSpec(()), loop=loop)) == graphs


@pytest.mark.parametrize("policy", [pytest.param("auto", marks=pytest.mark.long), "fraction:auto"])
def test_parameters_in_one_storage_are_trained_under_any_policy(policy: str) -> None:
    model = ModelSpec(("linear", "neighbours"))
    adam = OptimizerSpec("Adam", {"eps": 1e-2})
    spec = Spec(1, model, adam, options={**TIGHT, "policy": policy}, device_share=1.0)
    assert run(spec).status == "equal"


def test_a_parameter_that_is_part_of_a_larger_storage_is_counted_whole() -> None:
    """The meter counts storages, and `run` compares it with the plan."""
    spec = Spec(1, ModelSpec(("strided",)), options={**TIGHT, "policy": "resident"})
    assert run(spec).status == "equal"


def test_new_values_of_a_parameter_with_gaps_take_what_was_predicted() -> None:
    """Each is as large as the storage that the parameter is a part of, and keeps its strides."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 32)[:, ::2])
    optimizer = torch.optim.NAdam([weight], foreach=False)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (x @ weight).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            weight.mul_(0.9)

    run = cotrain(policy="resident", host_kernels="captured")(step)
    run(torch.ones(2, 16))
    compiled = cotrain_compile.inspect(run)
    assert compiled.measured is not None
    found, planned = (t.peak_bytes[Tier.DEVICE] for t in (compiled.measured, compiled.predicted))
    assert found == planned
    assert weight.stride() == (32, 2)


def test_a_view_of_a_gradient_that_is_no_longer_copied_shows_the_gradient() -> None:
    """`run` looks at every view of the captured graph."""
    spec = Spec(1, ModelSpec(("in place",)), options={**TIGHT, "policy": "resident"})
    assert run(spec).status == "equal"


def test_the_gradient_of_an_empty_parameter_is_not_its_learning_rate() -> None:
    """The rate is a tensor once it changes: of one element, where the gradient has none."""
    model = ModelSpec(("bfloat16", "empty parameter"))
    adamw = OptimizerSpec("AdamW", {"eps": 1e-2}, flags={"fused": True})
    loop = LoopSpec(rows=(4, 4, 4), rates=(1e-3, 5e-3, 2e-3))
    spec = Spec(1, model, adamw, loop, options={**TIGHT, "policy": "zero-offload"})
    assert run(spec).status == "equal"


@pytest.mark.long  # compiles C++
@pytest.mark.parametrize("layer", ["convolution", "prelu"])
def test_compiled_code_takes_no_more_than_in_the_dry_run(layer: str) -> None:
    """A kernel with memory of its own, and ops fused to one that holds what all of them need."""
    loop = LoopSpec(rows=(4, 4, 4), micro_batches=2)
    options = {**TIGHT, "lowering": "inductor"}
    spec = Spec(1, ModelSpec((layer,), reads_tokens=True), loop=loop, options=options)
    assert run(replace(spec, device_share=1.0)).status == "equal"


@pytest.mark.parametrize(
    "optimizer",
    ["AdamW", *(pytest.param(n, marks=pytest.mark.long) for n in ("SGD", "Adam", "Adagrad"))],
)
def test_the_host_updates_a_parameter_with_gaps_in_its_memory(optimizer: str) -> None:
    """ATen's fused loops go through memory as if there were none."""
    settings = {"momentum": 0.9} if optimizer == "SGD" else {}
    options = {**TIGHT, "policy": "zero-offload", "host_kernels": "fused"}
    model = ModelSpec(("strided",), dtype="float32")
    spec = Spec(1, model, OptimizerSpec(optimizer, settings), options=options)
    assert run(spec).status == "equal"


def test_a_step_that_returns_a_number_is_compiled() -> None:
    options = {**TIGHT, "policy": "resident", "lowering": "inductor"}
    spec = Spec(1, ModelSpec(()), loop=LoopSpec((4, 4), returns="item"), options=options)
    assert run(spec).status == "equal"


def test_a_copy_that_the_host_makes_and_the_step_reads_once_is_fetched_once() -> None:
    """The bias of the head in bfloat16: autocast makes it some ops before it is read."""
    model = ModelSpec(("group norm",), width=64, dtype="float32", reads_tokens=True)
    loop = LoopSpec((4, 4), autocast=True, clear="zeros")
    options = {**TIGHT, "policy": "greedy"}
    spec = Spec(1, model, OptimizerSpec("Adam"), loop, options=options, device_share=0.6)
    assert run(spec).status == "equal"
