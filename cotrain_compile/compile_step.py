"""Where `torch.compile(step, backend="cotrain")` begins: what the entry point in pyproject names.

Installations keep that name, so it stays as it is; what happens is in `entry/compile_step.py`.
"""

from cotrain_compile.entry.compile_step import cotrain

__all__ = ["cotrain"]
