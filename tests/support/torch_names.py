"""What importing the package asks of torch: names by dots, found in its source without a torch.

Those count that every import evaluates: imports and chains of attributes outside of functions, but
for what stands in an `if`, a `try` or a conditional expression, which ask first.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OURS = "torch.ops.cotrain."  # ops that the package itself registers
_ASKS_FIRST = (ast.If, ast.IfExp, ast.Try)
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def names_asked() -> set[str]:
    """`torch._dynamo.pgo`, `torch.ops.aten.copy_.default`, ...: all that the package asks."""
    folders = [ROOT / name for name in ("cotrain_compile", "backends", "passes")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = {name for path in files for name in _asked_by(ast.parse(path.read_text("utf-8")))}
    return {name for name in found if not name.startswith(_OURS)}


def exists(name: str) -> bool:
    """Whether the torch at hand has it."""
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        try:
            # Torch deletes the names of some modules: they are imported all the same.
            found = getattr(found, part, None) or importlib.import_module(".".join(parts[:at]))
        except ImportError:
            return hasattr(found, part)
    return True


def _asked_by(module: ast.Module) -> Iterator[str]:
    bound: dict[str, str] = {}
    for node in _evaluated(module):
        if isinstance(node, ast.ImportFrom) and _is_of_torch(node.module):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_of_torch(alias.name):
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name
        elif isinstance(node, ast.Assign) and (chain := _chain(node.value, bound)):
            bound |= {target.id: chain for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Attribute) and (chain := _chain(node, bound)):
            yield chain
    yield from bound.values()


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """What importing evaluates below `node`, in the order of the source; decorators too."""
    # Annotations are strings to Python.
    children = [node.value] if isinstance(node, ast.AnnAssign) else ast.iter_child_nodes(node)
    for child in children:
        if child is None or isinstance(child, _ASKS_FIRST):
            continue
        if isinstance(child, _LATER):
            for decorator in getattr(child, "decorator_list", []):
                yield from (decorator, *_evaluated(decorator))
            continue
        yield child
        if not (isinstance(child, ast.Attribute) and isinstance(child.value, ast.Attribute)):
            yield from _evaluated(child)


def _chain(node: ast.AST, bound: dict[str, str]) -> str | None:
    """The dotted name that `node` reads of torch."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _chain(node.value, bound)):
        return f"{owner}.{node.attr}"
    return None


def _is_of_torch(name: str | None) -> bool:
    return name is not None and name.partition(".")[0] == "torch"
