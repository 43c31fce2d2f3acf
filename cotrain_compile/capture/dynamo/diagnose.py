"""From an exception of Dynamo's to one error that names the user's line and the way to go on.

Sizes that depend on data: a tensor as large as the elements that a mask selects is refused.

A plan knows how many bytes are alive at every op, before the step runs. Ops that look at data to
raise an error, as `torch.linalg.solve` does where a matrix is singular, are refused as well.

Private torch API used: `free_unbacked_symbols`, the `example_value` and `stack_trace` of Dynamo's
nodes, the op `with_effects` by which AOTAutograd keeps such a check. Tried on torch 2.13.0.
"""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import NoReturn

import torch
import torch._dynamo.exc as exc
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cotrain_compile.capture.dynamo.ways_on import way_on
from cotrain_compile.errors import ON_META, CaptureError, CotrainError, OptionError
from cotrain_compile.graph.user_lines import first_line, in_library, in_package, user_line

# How alike two sentences are, of 1, where the second says no more than the first.
_ALIKE = 0.9

# What torch says of tensors on different devices.
_BESIDE_META = re.compile(r"(?:same device|different devices)\b.*\bmeta\b(?!-)")

# What torch says of an op on DTensors for which it has no rule, and of one on some beside others.
_NO_RULE = re.compile(r"Sharding propagation failed for (?:Op\(op=)?([\w.]+)")
_MIXED = re.compile(r"([\w.]+)\W* got mixed torch\.Tensor and DTensor")

# What it says of a backward through forward-mode derivatives of gradients under vmap.
_FORWARD_OVER_REVERSE = re.compile(r"<function grad at .*Please convert all Tensors to FakeTensors")

# What it says of an op that fails on tensors of these shapes and dtypes.
_FAILED_OP = re.compile(
    r": got (?P<kind>(?:Runtime|Value|Type|Index)Error)\((?P<quote>['\"])(?P<told>.*?)(?P=quote)"
)

# What Dynamo says at more length, and in words of its own, by a part of that.
_IN_SHORT = (
    ("torch._check", "it decides by the value of a tensor, which is not known in a graph"),
    ("numpy function", "it calls a function of NumPy's that torch does not trace"),
)

_NO_ANOMALIES = (
    "Switch off torch.autograd.set_detect_anomaly(True), by which backward() looks at every "
    "gradient; look for NaN with the step in eager, outside torch.compile"
)

_OF_ANOTHER_KIND = (
    "a gradient is part of a tensor of another dtype or device, as model.to() leaves gradients "
    "that are parts of one buffer; give each its own memory, p.grad = p.grad.clone(), or none"
)

# What it adds to the message of any error begins so.
_ADDED = "\nfrom user code:"

_IN_EAGER = '; or set options={"on_break": "warn"} to run it in eager. Nothing was updated.'


def diagnose(
    error: BaseException, refusal: CaptureError | None, code: CodeType, suggests_eager: bool = True
) -> CotrainError | None:
    """The user's error behind `error`: ours if one of ours is its cause, or what broke the graph.

    A fault of the step itself, as shapes that do not match, is named with the line as well. With
    `suggests_eager` it names the option that runs the step in eager as a last way on. Returns None
    when it is none of these.
    """
    location = _user_line(error, code)
    if refusal is not None:
        return (
            refusal
            if str(refusal).startswith((code.co_filename, first_line(code)))
            else CaptureError(f"{location}: {refusal}")
        )
    ours = next((cause for cause in _chain(error) if isinstance(cause, CotrainError)), None)
    if ours is not None:
        return _placed(_as_raised(ours), code)
    # A branch on a number that the trace read from a tensor is a UserError.
    if isinstance(error, exc.Unsupported | exc.UserError):
        return CaptureError(f"{location}: {_why_no_graph(error, location, suggests_eager)}")
    if isinstance(error, exc.TorchRuntimeError) and _BESIDE_META.search(str(error)):
        return OptionError(f"{location}: some tensors of the step are on meta: {ON_META}")
    if isinstance(error, exc.TorchRuntimeError):
        return CaptureError(f"{location}: {_why_it_failed(str(error))} Nothing was updated.")
    if isinstance(error, AssertionError) and _is_of_a_copy(error):
        return CaptureError(f"{location}: {_OF_ANOTHER_KIND}. Nothing was updated.")
    if isinstance(error, exc.FailOnRecompileLimitHit):
        return CaptureError(
            f"{location}: the step was compiled too often for changing inputs. Keep Python values "
            "that change every step out of it (pass tensors), or raise "
            "torch._dynamo.config.recompile_limit."
        )
    return None


def _placed(error: CotrainError, code: CodeType) -> CotrainError:
    """`error` with the step's first line, where it names no line of it."""
    has_line = str(error).startswith((code.co_filename, first_line(code)))
    if has_line or not isinstance(error, CaptureError):
        return error
    return CaptureError(f"{first_line(code)}: {error}")


def _why_no_graph(error: Exception, location: str, suggests_eager: bool) -> str:
    """What of a step Dynamo cannot trace, and the way on."""
    if isinstance(error, exc.Unsupported) and "Observed exception" in str(error):
        return (
            "the step raises this while it is traced. Nothing was updated. If it "
            'does not in eager, set options={"on_break": "warn"} to run it so'
        )
    what, hint = _what_broke(error)
    anomalies = torch.is_anomaly_enabled() and "data-dependent" in what
    way = (
        (_NO_ANOMALIES if anomalies else None)
        or way_on(_library_frames(error), what, location)
        or hint
        or "Move that line out of the step"
    )
    eager = _IN_EAGER if suggests_eager else "."
    return f"the step cannot be captured as one graph: {_in_short(what)}. {way}{eager}"


def _why_it_failed(text: str) -> str:
    """What of a step fails under fake tensors, in words for whoever wrote it."""
    if why := _why_not_on_shards(text):
        return f"{why}."
    if _FORWARD_OVER_REVERSE.search(text):
        return (
            "torch cannot trace a backward through forward-mode derivatives of "
            "gradients under vmap, such as torch.func.vmap(torch.func.hessian(f)); write "
            "torch.func.vmap(torch.func.jacrev(torch.func.jacrev(f)))."
        )
    if "tensor does not require grad" in text:
        return (
            "RuntimeError: this does not require a gradient, so there is none to "
            "compute: all that it comes from is frozen, detached, or computed under "
            "torch.no_grad() or torch.inference_mode(), which may also be around the call of the "
            "step."
        )
    if op := _FAILED_OP.search(text):
        return (
            f"{op['kind']}: {op['told'].rstrip('.')}. torch cannot run this line on "
            "tensors of these shapes and dtypes; call the step once without torch.compile to see "
            "all that it says."
        )
    told = text.partition(_ADDED)[0].strip().partition("\n")[0].rstrip(".")
    return (  # what fails in eager, too, in Dynamo's own words
        f"{told}. This line fails while the step is traced; call the step once "
        "without torch.compile to see what eager says."
    )


def _is_of_a_copy(error: AssertionError) -> bool:
    """Whether torch could not make a fake copy of a tensor, of which it asks what it looks like."""
    names = (frame.name for frame in traceback.extract_tb(error.__traceback__))
    return "assert_metadata_eq" in names


def _as_raised(error: CotrainError) -> CotrainError:
    """`error` without what Dynamo adds to the message of any error that passes through it."""
    if error.args and _ADDED in str(error.args[0]):
        error.args = (str(error.args[0]).partition(_ADDED)[0].rstrip(), *error.args[1:])
    return error


def _why_not_on_shards(text: str) -> str:
    """What of a step torch cannot do with DTensors, in eager neither; "" for all else."""
    mixed, no_rule = _MIXED.search(text), _NO_RULE.search(text)
    if mixed is not None:
        return (
            f"{mixed[1]} gets sharded and whole tensors, which DTensor does not take together; "
            "take them apart, and clip with cotrain_compile.clip_grad_norm, which does"
        )
    if no_rule is not None:
        return (
            f"{no_rule[1]} cannot be done on a shard of a tensor (torch has no rule for it on "
            "DTensors); use an optimizer or an op that works on each element by itself, such as "
            "AdamW"
        )
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, BaseException):
            yield from _chain(inner)
        error = error.__cause__ or error.__context__


def _what_broke(error: Exception) -> tuple[str, str]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = lines[0] if lines else "unsupported code"
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    explanation = explained.removeprefix("Explanation:").strip().rstrip(".")
    hint = next((line.removeprefix("Hint:").strip() for line in lines if "Hint:" in line), "")
    says_no_more = difflib.SequenceMatcher(None, what, explanation).ratio() > _ALIKE
    if explanation and not says_no_more:
        what += f" ({explanation})"
    library = _library_line(error)
    return what + (f" in {library}" if library else ""), hint.rstrip(".")


def _in_short(what: str) -> str:
    return next((short for part, short in _IN_SHORT if part in what), what)


def _user_line(error: BaseException, code: CodeType) -> str:
    """The deepest line outside installed packages, as `file:line in function: source`."""
    stack: Iterable[traceback.FrameSummary] = getattr(error, "real_stack", None) or ()
    mine = [frame for frame in stack if not in_library(frame.filename)]
    if not mine:
        return first_line(code)
    frame = mine[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}: `{(frame.line or '').strip()}`"


def _library_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines of installed packages that the trace went through below the user's last one."""
    stack: Iterable[traceback.FrameSummary] = getattr(error, "real_stack", None) or ()
    below: list[traceback.FrameSummary] = []
    for frame in stack:
        below = [*below, frame] if in_library(frame.filename) else []
    return below


def _library_line(error: BaseException) -> str:
    """The line of an installed package that broke the graph, as `package/file:line`, or nothing."""
    stack: Iterable[traceback.FrameSummary] = getattr(error, "real_stack", None) or ()
    *_, last = stack or (None,)
    file = in_package(last.filename) if last else None
    return f"{file}:{last.lineno}" if last and file else ""


# What raises for a singular matrix, with the name in torch.linalg of the one that does not, without
# its `_ex`. A function of the user's may have any of these names, so torch's are told by identity.
_RAISING = {
    **{
        getattr(torch.linalg, name): name
        for name in ("solve", "inv", "cholesky", "ldl_factor", "lu_factor")
    },
    torch.inverse: "inv",
    torch.cholesky: "cholesky",
}
_RAISING_METHODS = {"inverse": "inv", "cholesky": "cholesky"}


def refuse_sizes_from_data(module: fx.GraphModule) -> None:
    """Raise `CaptureError` for the first op whose result has a size that only its data tells."""
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
            raise _size_from_data(node)


def size_behind(symbols: Iterable[str], graph: fx.Graph | None) -> CaptureError | None:
    """The refusal of the first tensor in `graph` one of whose sizes is one of `symbols`."""
    for node in graph.nodes if graph is not None else ():
        value = node.meta.get("example_value")
        found = free_unbacked_symbols(value) if isinstance(value, torch.Tensor) else ()
        if {*symbols} & {str(symbol) for symbol in found}:
            return _size_from_data(node)
    return None


def _size_from_data(node: fx.Node) -> CaptureError:
    way = (
        "Keep the size: in place of x[mask] weigh every element "
        "(torch.where(mask, x, 0), and divide the sum by mask.sum(); where the loss takes "
        "ignore_index=-100, mark the targets so), in place of "
        "x[:n] pad to a fixed length and mask the rest; or select outside the step"
    )
    if f"torch_geometric{os.sep}" in (node.meta.get("stack_trace") or ""):
        way = (
            "Make a layer that adds self-loops with add_self_loops=False, and add the loops to the "
            "edges before the step: torch_geometric.utils.add_remaining_self_loops"
        )
    return CaptureError(
        f"{_line_of(node)}: the size of this result depends on the data, so no plan knows "
        f"how much memory it takes. {way}"
    )


def refuse_linear_algebra_that_raises(module: fx.GraphModule) -> None:
    """Raise `CaptureError` for the first op that raises in eager where a matrix is singular.

    From torch 2.13 on `refuse_checks_of_data` would see it; before, AOTAutograd drops the check.
    """
    for node in module.graph.nodes:
        raising = _RAISING_METHODS if node.op == "call_method" else _RAISING
        if called := raising.get(node.target):
            _refuse_check(called, f"{_line_of(node)}: ")


def refuse_checks_of_data(graph: fx.Graph) -> None:
    """Raise `CaptureError` for the first op of an ATen graph that may raise by what data says."""
    for node in graph.nodes:
        if str(node.target) != "with_effects":
            continue
        op, *rest = node.args[1:]
        called = next((arg for arg in rest if isinstance(arg, str)), "").rpartition(".")[2]
        where = f"{_line_of(node)}: " if node.meta.get("stack_trace") else ""
        if hasattr(torch.linalg, f"{called}_ex"):
            _refuse_check(called, where)
        raise CaptureError(
            f"{where}{op} acts on something other than tensors, which a captured step cannot. "
            "Move it out of the step"
        )


def _refuse_check(called: str, where: str) -> NoReturn:
    raise CaptureError(
        f"{where}torch.linalg.{called} looks at its result to raise an error, which a "
        f"captured step cannot. Use torch.linalg.{called}_ex(...)[0], which does not look "
        "(info, the last that it returns, says after the step whether it went well)"
    )


def _line_of(node: fx.Node) -> str:
    """The user's line that made `node`, as `file:line in function: source`."""
    return user_line(node.meta.get("stack_trace")) or f"op {node.name}"
