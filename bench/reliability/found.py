"""What campaigns have broken and was fixed since, with the tests that keep it fixed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """What a campaign has broken, and the test that fails where it comes back."""

    what: str
    test: str


FOUND = (
    Found(
        "Once all ranks had changed a number that their updates read, as what gradients are "
        "clipped to, `check_replicas` compared no parameters any more, without a word.",
        "tests/unit/runtime/test_same_on.py",
    ),
    Found(
        "With `overlap_steps` a parameter could not be swapped for another: what updates had "
        "written was held by weak references when they were long done, and torch swaps none then.",
        "tests/graph/runtime/test_overlap_contract.py",
    ),
    Found(
        "What had changed in one training was remembered for all that run the same code, beyond "
        "`torch._dynamo.reset()` too: ranks with different pasts compiled different steps, and "
        "raised RanksApart though they did the same.",
        "tests/graph/capture/test_recompiles.py",
    ),
    Found(
        "A batch in the memory of a parameter, in a step whose sizes change, and gradients in a "
        "buffer of the dtype that the model had before, ended in errors of torch's.",
        "tests/graph/backends/test_one_home.py",
    ),
    Found(
        "A parameter without a gradient, before others that look alike in Adam or AdamW, ended in "
        "an error of Dynamo's: the state that is dropped let the next ones change their sizes.",
        "tests/graph/capture/test_alike_layers.py",
    ),
    Found(
        "Where all gradients are parts of one flat buffer, an update on the host took the first "
        "one of it for its own: wrong numbers, or a StepFailed in the middle of the update.",
        "tests/graph/exactness/test_sequences.py",
    ),
    Found(
        "A step whose loss needs no gradient, as under `torch.no_grad()`, ended in an error of "
        "Dynamo's.",
        "tests/graph/exactness/test_sequences.py",
    ),
    Found(
        "A step of changing sizes that copies into an input, or makes values whose sizes torch "
        "keeps as symbols in its updates, ended in a RuntimeError.",
        "tests/graph/capture/test_kernel_values.py",
    ),
    Found(
        "Where the peak of a step is in its updates, small ones in lock step took up to 9 % less "
        "of the device than was predicted.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "The graph of a step that was found on disk could not be called.",
        "tests/graph/capture/test_trace_cache.py",
    ),
    Found(
        "A rank of a pipeline with a batch of another size, or whose turn failed, raised alone, "
        "and the others waited for it until the timeout of their group.",
        "tests/graph/distribute/test_pipeline.py",
    ),
    Found(
        "An overlapping update that failed before its step returned was told by the next step "
        "alone, not by `synchronize()` nor when a `state_dict` was taken.",
        "tests/graph/runtime/test_overlap_contract.py",
    ),
    Found(
        "New values of a parameter with gaps between its elements lost its strides, and took "
        "other memory than was predicted.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "Updates of a layer at one place, with gradients that had been offloaded: a KeyError.",
        "tests/unit/placement/test_layer_updates.py",
    ),
    Found(
        "A float64 parameter or state of no dimensions was not updated, without an error: Dynamo "
        "(torch 2.13) drops in-place ops on one when it traces again.",
        "tests/graph/capture/test_scalar_parameters.py",
    ),
    Found(
        "Two parameters that are parts of one storage got two updates of one name, and the plan "
        "was refused as unsound. They now stay on the device.",
        "tests/graph/extract/test_extract.py",
    ),
    Found(
        "A parameter that is part of a larger storage was planned with fewer bytes than it holds.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "A pipe, device or file of any size given as plan, step or machine was read for ever.",
        "tests/unit/data/test_fuzz_files.py",
    ),
    Found(
        "A plan that lacked a tier, named what its step has not, or had times below zero ended in "
        "a KeyError or ValueError of `show`, `diff`, `graph` or `explain`.",
        "tests/unit/data/test_fuzz_files.py",
    ),
    Found(
        "Options with numbers that no float holds, or that were no dictionary, ended in an "
        "OverflowError or AttributeError.",
        "tests/unit/data/test_fuzz_files.py",
    ),
    Found(
        "Where pulp could not be imported, `import cotrain_compile.compile` ended in a "
        "ModuleNotFoundError, and `autotm` policies without HiGHS in an error of pulp's.",
        "tests/unit/placement/test_without_solvers.py",
    ),
    Found(
        "A program whose solver was stopped before it had a bound was reported as without one; "
        "it is that of no time now, as for CBC.",
        "tests/unit/placement/test_solver_faults.py",
    ),
    Found(
        "A parameter without elements, beside a learning rate that changes: the rate, a tensor "
        "then, was taken for its gradient, and the plan was refused as unsound.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "One of two parameters in one storage was taken for frozen, to rest on the host though the "
        "step writes it, and the plan was refused as unsound.",
        "tests/unit/placement/test_strategies.py",
    ),
    Found(
        "A step compiled with Inductor took more of the device than its plan said, though no more "
        "than the budget. What its dry run took is told now, and no step exceeds that.",
        "tests/graph/backends/test_inductor.py",
    ),
    Found(
        "A step that was planned again after a dry run was held to what it was planned for, "
        "failed again, and was refused though it had room.",
        "tests/graph/backends/test_first_step.py",
    ),
    Found(
        "Where a value was made again for the backward, a view of it in the backward was taken for "
        "one of the forward's value: that was counted to there, and the new one was not.",
        "tests/graph/capture/test_rematerialise.py",
    ),
    Found(
        "Where autograd's copy of a gradient is left out, a view of the copy was counted beside "
        "the gradient that it shows.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "One of several results of an op, fetched before the step took it from the op, was kept "
        "beside its copy until then: out of memory in the budget that was planned.",
        "tests/graph/passes/test_rewrite.py",
    ),
    Found(
        "With Inductor and some segments in eager, a norm under autocast on the CPU made NaN: its "
        "statistics are float32, and compiled code read bfloat16, as the trace said.",
        "tests/graph/capture/test_kernel_values.py",
    ),
    Found(
        "Norms under autocast on the CPU, and writes into part of a tensor, took other memory than "
        "the trace said.",
        "tests/graph/capture/test_kernel_values.py",
    ),
    Found(
        "With Inductor on torch before 2.15, as in plain `torch.compile`, a loop could read what a "
        "scatter in it had yet to write: wrong numbers, without an error.",
        "tests/graph/backends/test_scatters.py",
    ),
    Found(
        "A float32 parameter with gaps in its memory was updated on the host by a fused loop that "
        "knows none: wrong numbers. The comparison with the captured ops was made without gaps.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "With Inductor, a step that returns a number failed with an AttributeError.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "A low-precision copy that the step reads once, some ops after it is made, was to be "
        "fetched twice, and the plan was refused as unsound.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "Policy `ilp` alone, near the least budget that would do, was refused for a limit of time "
        "that was not reached, though there is a plan.",
        "tests/unit/placement/test_solve.py",
    ),
    Found(
        "What a plan lacked on the host was taken off the device's budget when it was looked for "
        "again: `ilp`, `lp-round` and `greedy` were refused though there is a plan.",
        "tests/unit/placement/test_solve.py",
    ),
    Found(
        "A view that was made for an update moved to an earlier place kept a gradient on the "
        "device beside its fetched copy.",
        "tests/graph/passes/test_races.py",
    ),
    Found(
        "A whole number that a script counts as a global was a constant of the trace: the numbers "
        "were right, but the step was compiled in every call.",
        "tests/graph/capture/test_scripts.py",
    ),
    Found(
        "With Inductor, a step that computes with a whole number that changes ended in a KeyError.",
        "tests/graph/capture/test_recompiles.py",
    ),
    Found(
        "A step that counts in its closure (`nonlocal`) was not found by `inspect`.",
        "tests/graph/capture/test_recompiles.py",
    ),
    Found(
        "An optimizer that counts its steps in an attribute of its own never counted.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "Second derivatives through an `autograd.Function`, or through `p.grad` after "
        "`backward(create_graph=True)`, were zero.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "A gradient that a step returned, or kept in a list, was None.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "One tensor as the gradient of two parameters was clipped once, and a full `deque` counted "
        "one item too many.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "A layer that was replaced between calls and put back was not trained any more.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "What an optimizer makes by `eye` or `zeros` in its first step came with an update to "
        "behind other ops that read it, and the plan was refused as unsound.",
        "tests/unit/placement/test_unusual_steps.py",
    ),
    Found(
        "A value of the forward was planned both offloaded and recomputed: unsound.",
        "tests/unit/placement/test_unusual_steps.py",
    ),
    Found(
        "Names from a file reached the terminal with the commands in them.",
        "tests/unit/data/test_fuzz_files.py",
    ),
    Found(
        "Layers whose sizes hang on data, as rows that a norm masks, were compared by value: an "
        "error of torch's about a guard.",
        "tests/graph/capture/test_alike_layers.py",
    ),
    Found(
        "Near its least memory, a step whose updates make large values came to states that had "
        "arrived too early for the update before them: an assertion of the search.",
        "tests/unit/placement/test_updates_with_temporaries.py",
    ),
    Found(
        "What read a parameter between its write and the last op of its update was taken for a "
        "reader of the old one: a candidate of the search, and of two rules, was unsound.",
        "tests/unit/placement/test_updates_with_temporaries.py",
    ),
    Found(
        "A step under autocast that ran in parts was told to be wrong for a rounding to bfloat16.",
        "tests/graph/backends/test_verify.py",
    ),
    Found(
        "At exactly its least memory a step in parts offloaded what it made again: a `PlanError`.",
        "tests/unit/placement/test_cover.py",
    ),
)
