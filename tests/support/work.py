"""Work: what a search may do in a test that is not about how good its plan is, told here once.

A step of a few hundred ops has a sound plan for that, mostly the best one, and always the same.
"""

from __future__ import annotations

LITTLE_WORK = 2.0
