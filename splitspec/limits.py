"""How much a request may bring: of each list, map and text that isn't bounded by the context already.

They are far above what clients send, and so small that what costs most at the limit isn't felt by others. The
coordinator tells them in Describe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

from splitspec.errors import InvalidRequestError

#: Of the names that a request brings: ids of request and session, tenant, drafter, role; and of handles.
MAX_NAME_BYTES = 256
#: Of a prompt's text, or of the contents of all its messages together.
MAX_PROMPT_BYTES = 3 * 2**20
MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 128
#: Of each stop string, and of all together: an automaton of as many states looks for them.
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_STRINGS_BYTES = 8192
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
#: Of allowed and of banned ones: each proposal is sealed for all of them.
MAX_RESTRICTED_TOKEN_IDS = 4096
#: Ids that end an output: the request's own and the model's.
MAX_ENDING_TOKEN_IDS = MAX_STOP_TOKEN_IDS + 256
#: Of a text that a worker is handed, far beyond any model's context.
MAX_TEXT_TOKENS = 2**24
MAX_FEATURE_LAYERS = 64


def check_count(field: str, values: Sized, most: int) -> None:
    """Raise InvalidRequestError for more than `most` entries."""
    if len(values) > most:
        raise InvalidRequestError(f"{field} has {len(values)} entries, expected at most {most}", field=field)


def check_bytes(field: str, texts: str | Iterable[str], most: int) -> None:
    """Raise InvalidRequestError for a text, or texts together, of more than `most` bytes in UTF-8."""
    size = len(texts.encode()) if isinstance(texts, str) else sum(len(text.encode()) for text in texts)
    if size > most:
        raise InvalidRequestError(f"{field} has {size} bytes, expected at most {most}", field=field)


def check_names(**names: str) -> None:
    """Raise InvalidRequestError for the first that is too long. Two underscores stand for a dot."""
    for name, text in names.items():
        check_bytes(name.replace("__", "."), text, MAX_NAME_BYTES)
