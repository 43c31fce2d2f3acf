"""What has a step compiled again and again: the value that every earlier trace was made for.

In: Dynamo's reasons why no graph that it has fits a call, one for each graph. Out: a sentence with
the user's line and the way on, where most of them are about one value, such as a list that grows.

A reason is text: a guard as an expression of Python, the user's line and its place as comments. The
expression is parsed as such. A step that is refused since there are too many graphs, for what is no
expression or names no variable, is refused in torch's own words.

Private torch API used: `convert_frame.get_and_maybe_log_recompilation_reasons`. Reason: only the
guards of a graph know why it does not fit. Tried on torch 2.13.0, and with reasons that are
numbered and worded otherwise; where a torch has no such function, nothing is said.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._dynamo import convert_frame

from cotrain_compile.capture.dynamo.session import Session

Patch = tuple[Any, str, Any]

_ASK = "get_and_maybe_log_recompilation_reasons"
# So many graphs that one value has made useless: a batch size or a mode has fewer.
_MANY = 4

# Which graph it is, before a reason: `0/1: `, `1/0_1: `, `[0/1]: `.
_WHICH_GRAPH = re.compile(r"^\W*\d+/\d\w*\W*:?\s+")
_SCOPES = ("L", "G")
# Where a module has its submodules, parameters and buffers.
_MEMBERS = ("_modules", "_parameters", "_buffers")
# Where in a list: an optimizer that looks into a table looks elsewhere in each step.
_PLACE = re.compile(r"(\[\d+\])")
_OF_AN_OPTIMIZER = re.compile(r"\.param_groups\[|\.state\[")
_ROUNDS = re.compile(r"\brange\(")


@dataclass(frozen=True)
class _Reason:
    """Why a graph does not fit: the value that changes and the line of the user's, or ""."""

    value: str
    line: str
    text: str


def reasons_noted(session: Session) -> Iterator[Patch]:
    """What is replaced so that `session` learns why the step is compiled again."""
    original = getattr(convert_frame, _ASK, None)
    if original is not None:
        yield convert_frame, _ASK, _noted(session, original)


def _noted(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        reasons = original(*args, **kwargs)
        session.changing = what_changes(reasons)
        session.last_reason = in_torchs_words(reasons)
        return reasons

    return ask


def what_changes(reasons: Iterable[object]) -> str | None:
    """A sentence about the value that has made many graphs useless, and what to do; or None."""
    found = [_parsed(str(reason)) for reason in reasons]
    # A guard without a line of the user's, or on hooks, is torch's or ours.
    known = [r for r in found if r.value and r.line and not r.value.endswith("_hooks")]
    counts = Counter((_anywhere(reason.value), reason.line) for reason in known)
    (value, line), count = max(counts.items(), key=lambda item: item[1], default=(("", ""), 0))
    if count < _MANY:
        return None
    value = _in_common([r.value for r in known if (_anywhere(r.value), r.line) == (value, line)])
    if _OF_AN_OPTIMIZER.search(value):
        return (
            f"`{value}` of the optimizer changes from call to call, and its step decides by it: "
            f"`{line}`. Keep what it counts and computes in tensors, in `optimizer.state`, and "
            "decide with torch.where; or take the optimizer of that name from torch.optim"
        )
    if _ROUNDS.search(line):
        return (
            f"`{value}` changes from call to call, and is the number of rounds of a loop: `{line}`."
            " All rounds are in one graph, so each number of them is a graph of its own. Let it "
            "take a few values, or always do the most rounds and weigh those that are too many "
            "with zero, in a tensor that is an argument"
        )
    return (
        f"`{value}` changes from call to call, and every graph of the step has it as a constant: "
        f"`{line}`. Change it outside the step, and pass in what the step needs of it, as a tensor "
        "or as a number that is an argument; what a step appends to a list it can return"
    )


def _anywhere(value: str) -> str:
    return _PLACE.sub("[...]", value)


def _in_common(values: Iterable[str]) -> str:
    """Values that differ in no more than places in lists, as one."""
    parts = zip(*(_PLACE.split(value) for value in values), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "[...]" for part in parts)


def in_torchs_words(reasons: Iterable[object]) -> str | None:
    """Why the graph that fitted last does not fit, as torch says it, or None.

    Dynamo asks that one first.
    """
    found = [_parsed(str(reason)).text for reason in reasons]
    return found[0] if found and found[0] else None


def why_again(reason: str) -> str:
    """A reason of torch's for whoever waits for the compile: what no longer holds, or else what."""
    if _value(reason):
        as_written = ast.unparse(_Unscoped().visit(ast.parse(reason, mode="eval")))
        return f"`{as_written}` no longer holds"
    return reason.partition(" Guard failed on a parameter")[0]  # that Dynamo could have dynamic


def _parsed(reason: str) -> _Reason:
    text = _WHICH_GRAPH.sub("", reason.strip())
    told, _, stack = text.partition("\n")
    guard, _, comment = told.partition("  #")
    line = comment.partition("  #")[0].strip() or _last_source_line(stack)
    return _Reason(_value(guard.strip()), line, " ".join(guard.split()))


def _last_source_line(stack: str) -> str:
    """The innermost line of the user's in a stack, where torch tells one below the reason."""
    lines = [line.strip() for line in stack.splitlines() if line.strip()]
    is_source = len(lines) > 1 and lines[-2].startswith("File ")
    return lines[-1] if is_source else ""


def _value(guard: str) -> str:
    """The value that a guard is about, as the user writes it (`losses`), or ""."""
    try:
        node: ast.AST = ast.parse(guard, mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    while not _names_a_value(node):
        match node:
            case ast.UnaryOp(operand=inner) | ast.Compare(left=inner):
                node = inner
            case ast.BoolOp(values=[inner, *_]) | ast.Call(args=[inner, *_]):
                node = inner
            case _:
                return ""
    return ast.unparse(_Unscoped().visit(node))


def _names_a_value(node: ast.AST) -> bool:
    """Whether it is a variable, or an attribute or item of one."""
    while isinstance(node, ast.Attribute | ast.Subscript) and not _scoped(node):
        node = node.value
    return isinstance(node, ast.Name) or _scoped(node)


def _scoped(node: ast.AST) -> bool:
    """Whether it is `L['x']` or `G['x']`: a variable, by where it is found."""
    match node:
        case ast.Subscript(value=ast.Name(id=scope), slice=ast.Constant(value=str())):
            return scope in _SCOPES
    return False


class _Unscoped(ast.NodeTransformer):
    """`G['losses']` becomes `losses`, `model._modules['0']._parameters['bias']` `model[0].bias`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if _scoped(node) and isinstance(node.slice, ast.Constant):
            return ast.Name(id=str(node.slice.value), ctx=ast.Load())
        self.generic_visit(node)
        match node:
            case ast.Subscript(ast.Attribute(owner, attr), ast.Constant(str(name))):
                if attr in _MEMBERS:
                    return _member(owner, name)
        return node


def _member(owner: ast.expr, name: str) -> ast.expr:
    """A submodule, parameter or buffer of a module, as a user reaches it."""
    if name.isdigit():
        return ast.Subscript(value=owner, slice=ast.Constant(value=int(name)), ctx=ast.Load())
    return ast.Attribute(value=owner, attr=name, ctx=ast.Load())
