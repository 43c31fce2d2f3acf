"""A figure that a sentence of the documentation quotes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUMBER = r"([-+]?\d(?:[\d.,]*\d)?(?:e[-+]?\d+)?)"

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """Numbers quoted in a page: the sentence, a pattern of the JSONs, and what they say there."""

    page: str
    sentence: str
    json: str
    values: Callable[[Result], Sequence[str]]

    @property
    def pattern(self) -> re.Pattern[str]:
        """The sentence in a page, however its lines are broken."""
        words = (re.escape(word).replace(r"\{\}", NUMBER) for word in self.sentence.split())
        return re.compile(r"\s+".join(words))
