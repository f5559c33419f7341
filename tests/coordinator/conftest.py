"""Models for the coordinator's tests: directories with small tokenizers of each kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from coordinator.text import TextCodec
from splitspec.vocabulary import Vocabulary

SPECIAL_TOKENS = ["<|end|>", "<|begin|>", "<|user|>"]
LINES = [
    "Hello world, hello there!",
    "The STOP of the stop. Stop it, then go on.",
    "naïve café, 日本語",
    "a b c",
]

SaveModel = Callable[..., Path]


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    """Saves a byte-level tokenizer as a model directory, with the settings and template of a test."""

    def save(config: dict[str, Any] | None = None, template: str | None = None) -> Path:
        byte_level().save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config)
            (tmp_path / "tokenizer_config.json").write_text(settings)
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return save


@pytest.fixture(scope="session")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    """A codec for each kind of decoder that language models use."""
    kinds = {
        "byte level": byte_level(),
        "byte fallback": byte_fallback(
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        ),
        "byte fallback, space kept": byte_fallback(
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
        ),
        "metaspace": byte_fallback(decoders.Metaspace()),
        "word piece": byte_fallback(decoders.WordPiece(prefix="▁")),
        "none": byte_fallback(),
    }
    loaded = {}
    for kind, tokenizer in kinds.items():
        directory = tmp_path_factory.mktemp("model")
        tokenizer.save(str(directory / "tokenizer.json"))
        loaded[kind] = TextCodec.load(directory)
    return loaded


def byte_level() -> Tokenizer:
    """Bytes, a few merges of LINES, special tokens, and added tokens with text of their own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("é🙂")])
    return tokenizer


def sentence_piece_codecs() -> dict[str, TextCodec]:
    """A begin token and a space before a text, which the decoder takes away, in three ways of writing it."""
    space = normalizers.Replace(" ", "▁")
    ways = {
        "prepend": (normalizers.Sequence([normalizers.Prepend("▁"), space]), None),
        "metaspace, first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        "strip and metaspace, always": (
            normalizers.Strip(right=False),
            pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always", split=False)]),
        ),
    }
    return {name: sentence_piece(normalizer, splitter) for name, (normalizer, splitter) in ways.items()}


def sentence_piece(
    normalizer: normalizers.Normalizer | None, splitter: pre_tokenizers.PreTokenizer | None
) -> TextCodec:
    """As Llama 2's: byte fallback, and words that begin with a space."""
    words = ["▁", "▁a", "▁b", "▁Hello", "Hello", "a", "b", ",", "H", "e", "l", "o"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "a"), ("▁", "b"), ("H", "e"), ("l", "l"), ("He", "ll"), ("Hell", "o"), ("▁", "Hello")]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, "He", "ll", "Hell"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return TextCodec(Vocabulary.of(tokenizer), None)


def byte_fallback(*chain: decoders.Decoder) -> Tokenizer:
    """Pieces with a visible space, and a token for each byte, as SentencePiece makes them."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *("▁", "▁▁", "▁Hello", "▁world", "STOP", "ST", "OP", ",", ".", "日", "\ufffd"),
        *"abcdefghijklmnopqrstuvwxyz",
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    if len(chain) == 1:
        tokenizer.decoder = chain[0]
    elif chain:
        tokenizer.decoder = decoders.Sequence(list(chain))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def byte_id(codec: TextCodec, byte: int) -> int:
    """The id of the token that is one byte."""
    token = codec.vocabulary.tokenizer.token_to_id(f"<0x{byte:02X}>")
    if token is None:
        token = codec.vocabulary.tokenizer.token_to_id(BYTE_CHARACTERS[byte])
    assert token is not None
    return token


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


BYTE_CHARACTERS = byte_characters()
