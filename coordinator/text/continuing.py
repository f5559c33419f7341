"""A tokenizer for text that follows other text."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer


def continuing(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without what it puts before a text or strips from its beginning.

    Returns the tokenizer itself when it does neither. Special tokens are the caller's: encode without them.
    """
    spec = json.loads(tokenizer.to_str())
    parts = {name: _continuing(spec[name]) for name in ("normalizer", "pre_tokenizer")}
    if all(part == spec[name] for name, part in parts.items()):
        return tokenizer
    return Tokenizer.from_str(json.dumps(spec | parts))


def _continuing(part: Any) -> Any:
    """A normalizer or pre-tokenizer as tokenizer.json has it; None when nothing is left of it."""
    match part:
        case {"type": "Sequence", "normalizers": parts}:
            return {**part, "normalizers": [kept for each in parts if (kept := _continuing(each))]}
        case {"type": "Sequence", "pretokenizers": parts}:
            return {**part, "pretokenizers": [_continuing(each) for each in parts]}
        case {"type": "Prepend"}:
            return None
        case {"type": "Strip"}:
            return {**part, "strip_left": False}
        case {"type": "Metaspace"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**part, "add_prefix_space": False}
    return part
