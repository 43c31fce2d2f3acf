"""Ways on: what a user can do about code that breaks the graph, by where and how it does.

In: the lines of installed packages from the user's last line to the code that broke the graph, and
Dynamo's words for it. Out: a sentence, or None where nothing is known that is better than Dynamo's
own hint.
"""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Sequence

import torch

_OPTIMIZERS = os.path.dirname(os.path.abspath(torch.optim.__file__))

_LIGHTNING = (
    "with automatic optimization, leave the module as it is and give the Trainer "
    "strategy=CotrainStrategy(cotrain={...}) of cotrain_compile.integrations.lightning; with "
    "manual optimization, compile a function of your own that calls the model, "
    "loss.backward() in place of manual_backward(), and step() and zero_grad() of the "
    "optimizer inside Lightning's wrapper, optimizer.optimizer; count its steps yourself, which "
    "trainer.global_step and max_steps do not"
)

_FABRIC = (
    "a graph cannot stop in its middle to look at a number: fabric.clip_gradients(..., "
    "error_if_nonfinite=False). With a loss that Fabric scales (16-mixed), call model.module under "
    "fabric.autocast()"
)

# What Dynamo says where it cannot yet trace what it can from this torch on.
_NEWER = "2.13"
_UNTIL_THEN = ("`find_spec`", "call_id() without source")

# By words of an exception that a framework raises in a trace, and in eager does not.
_RAISED_IN_A_TRACE = (("fabric.backward(loss)", _FABRIC),)

_SCHEDULER = "call scheduler.step() outside the step, after it"

# By a part of the path of a file that the trace has gone through.
_FRAMEWORKS = (
    ("/accelerate/scheduler.py", _SCHEDULER),
    (
        "/accelerate/",
        "a graph cannot count calls as Accelerate does: write `with accelerator.accumulate(...):` "
        "around the call of the step, not in it (the rest may stay in the step), or run the "
        "micro-batches of an update in one step",
    ),
    (
        "/trl/",
        "TRL's loss looks at values, for its metrics: in `class MyTrainer(CotrainTrainer, "
        "SFTTrainer)` set `compute_loss = transformers.Trainer.compute_loss`: the model's own, "
        "which is the same number",
    ),
    (
        "/torchtune/modules/transformer.py",
        "torchtune's output in chunks is not for a compiler: leave set_num_output_chunks() out and "
        "take torch.nn.CrossEntropyLoss(), which the plan runs in parts where memory is short",
    ),
    ("/lightning_fabric/", _FABRIC),
    ("/lightning/fabric/", _FABRIC),
    ("/lightning/pytorch/", _LIGHTNING),
    ("/pytorch_lightning/", _LIGHTNING),
    (
        "torch/nn/modules/transformer.py",
        "say whether the mask is causal, so that nobody looks into it: is_causal=True (or False) "
        "to an encoder, tgt_is_causal=True (or False) to nn.Transformer and a decoder",
    ),
    (
        "torch/nn/utils/clip_grad.py",
        "clip with error_if_nonfinite=False, and look at the norm that the step returns; where "
        "frozen weights are quantized, clip [p for p in model.parameters() if p.requires_grad]",
    ),
)

_DRAW = (
    "draw the numbers with torch in the step (torch.rand((), device=...), torch.randint), or draw "
    "them before it and pass them in as tensors"
)

SAVED_TENSORS = (
    "leave out the hooks on saved tensors: the plan itself offloads, or recomputes, "
    "what backward() needs, so that memory_budget holds"
)
WITHIN_A_TRANSFORM = "call torch.func and vmap in the step, of the function that computes the loss"
DISPATCH_MODES = (
    "leave the mode out (a FlopCounterMode, allow_mutation_on_saved_tensors and their like are "
    "modes), or call the step in eager, outside torch.compile, where one is needed"
)
FUNCTION_MODES = (
    "write what the mode does into the step, or call the step in eager, outside torch.compile "
    "(with torch.device(...) and torch.set_default_device may stay)"
)
ANOMALIES = (
    "look for anomalies with the step in eager, outside torch.compile, and leave it out here"
)

# By words in Dynamo's own description, or in the source that broke the graph.
_WORDS = (
    (
        ("load_state_dict",),
        "copy the tensors in the step, under torch.no_grad(): "
        "for p, q in zip(module.parameters(), other.parameters()): p.copy_(q); or load between "
        "two calls of the step",
    ),
    (("print",), "move the print out of the step, or print what the step returns"),
    (("Random.", "numpy.random", "default_rng", "`RandomState`", "`Generator`", "`Random`"), _DRAW),
    (
        ("`cython_function_or_method`",),
        "this calls a function made with Cython, as methods of NumPy's generators are. Where it is "
        f"one, {_DRAW}; call any other before the step, and pass in what it returns",
    ),
    (
        ("tp_iternext",),
        "call next() outside the step, and pass in what it gives; to count, keep a number",
    ),
    (
        ("`SimpleNamespace.__setattr__`", "`__setattr__` of class `SimpleNamespace`"),
        "keep what the step sets in a dictionary, or in an object of a class of yours",
    ),
    (
        ("setattr() is not supported on type function",),
        "keep what the step sets in a global, a dictionary or an object, not on a function",
    ),
    (("`time.", ".time."), "read the clock outside the step"),
    (("LRScheduler.step",), _SCHEDULER),
    (
        ("save_on_cpu", "saved_tensors_hooks"),
        SAVED_TENSORS,
    ),
    (
        ("detect_anomaly", "set_detect_anomaly"),
        ANOMALIES,
    ),
    (
        ("Module-level backwards hooks",),
        "remove the full backward hook and register one on what the module returns, in the step: "
        "h = module(x), then h.register_hook(...); or work on p.grad after backward()",
    ),
    (
        ("`getset_descriptor.__set__`", "`__set__` of class `getset_descriptor`"),
        "this comes of a TorchFunctionMode in the step, under which torch cannot trace "
        "what sets a gradient; leave the mode out, and call in the step what it does instead",
    ),
    (
        ("logging.Logger",),
        "log outside the step what it returns; the value of a tensor is not known while it is "
        "traced, which is when a captured step logs",
    ),
    (
        ("`lock` context manager",),
        "call the model once before, in eager (with torch.no_grad(): model(...)): what it sets up "
        "under the lock in its first call is there then",
    ),
    (
        ("labels.max()",),
        "leave out the labels, whose values the model looks at, and compute the loss in the step "
        "from the model's logits",
    ),
    (
        ("Unsafe side effect",),
        "return from the checkpointed function what it keeps elsewhere, and keep it behind the "
        "checkpoint; a list or dictionary that the step makes may be filled in one with "
        "use_reentrant=False",
    ),
    (
        ("requires_grad_",),
        "freeze and unfreeze between steps, outside the step; where it keeps the gradients of one "
        "loss from a model, say which ones to compute instead: "
        "loss.backward(inputs=list(model.parameters()))",
    ),
    (
        ("_ctc_loss",),
        "no captured step can have the CTC loss, whose table is as large as the longest target, "
        "which is data: train this step without torch.compile",
    ),
    (
        ("is_inference_mode_enabled",),
        "torch.inference_mode is torch.no_grad in a captured step; ask torch.is_grad_enabled()",
    ),
    (("tolist",), "index the tensor (x[0], x.unbind()) in place of .tolist(), or pass numbers in"),
    (("item",), "return the tensor and call .item() outside the step"),
    (
        ("numpy function unsupported",),
        "call it outside the step, on what the step returns (.numpy() there)",
    ),
    (
        ("data-dependent", "decides by the value"),
        "decide outside the step, or with torch.where inside it",
    ),
)

# By words in the user's own line, where Dynamo's description names neither.
_LINES = (
    (
        "torch.cov(",
        "write the covariance out, which looks at no data: off = x - x.mean(1, keepdim=True), then "
        "off @ off.T / (x.shape[1] - 1); or compute it outside the step",
    ),
    (
        "disable_adapter(",
        "PEFT freezes and thaws layers there, which is not part of a step: compute what the model "
        "says without adapters before the step, under torch.no_grad(), and pass it in",
    ),
    ("RandomState(", _DRAW),
    (
        "generator=",
        "leave out generator=, so that the numbers are of torch's own generator (seed it with "
        "torch.manual_seed), or draw them before the step and pass them in",
    ),
)


def way_on(stack: Sequence[traceback.FrameSummary], what: str, users_line: str = "") -> str | None:
    """What to do about `what`, Dynamo's description of what the last line of `stack` does.

    `users_line` is the last line of the user's that led there.
    """
    if stack and os.path.abspath(stack[-1].filename).startswith(_OPTIMIZERS):
        return "Create the optimizer with capturable=True where it has that, or use another one"
    if any(words in what for words in _UNTIL_THEN) and torch.__version__ < _NEWER:
        return (
            f"torch {torch.__version__} cannot trace this, and {_NEWER} can: take that, or write a "
            "loop of your own over the same model"
        )
    paths = [frame.filename.replace(os.sep, "/") for frame in stack]
    source = _source(stack[-1]) if stack else ""
    found = [way for part, way in _FRAMEWORKS if any(part in path for path in paths)]
    found += [
        way
        for words, way in _WORDS
        if any(word in what or _is_in_source(word, source) for word in words)
    ]
    found += [way for word, way in _LINES if word in users_line]
    return found[0][0].upper() + found[0][1:] if found else None


def way_on_of(raised: BaseException) -> str | None:
    """What to do about an exception that a framework raises since the step is traced, or None."""
    told = str(raised)
    found = next((way for words, way in _RAISED_IN_A_TRACE if words in told), None)
    return f"{told} {found[0].upper()}{found[1:]}" if found else None


def _is_in_source(word: str, source: str) -> bool:
    return word in ("labels.max()", "load_state_dict") and word in source


def _source(frame: traceback.FrameSummary) -> str:
    """The source of the statement at `frame`, all its lines."""
    last = getattr(frame, "end_lineno", None) or (frame.lineno or 0) + 2
    lines = (linecache.getline(frame.filename, n) for n in range(frame.lineno or 1, last + 1))
    return "".join(lines)
