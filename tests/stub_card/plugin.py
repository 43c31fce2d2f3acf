"""`pytest -p tests.stub_card.plugin`: the card is loaded before anything imports torch."""

from __future__ import annotations

from tests.stub_card import card

if card.why_not() is None:
    card.load()
