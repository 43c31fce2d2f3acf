"""Where Hugging Face looks for what packs and pads; nothing here calls it."""

from tests.support.flash_package import pad_input, unpad_input

__all__ = ["pad_input", "unpad_input"]
