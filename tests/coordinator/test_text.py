"""Prompts, chat templates and text as it grows; transformers and the full decode are the oracles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from coordinator.text import Detokenizer, TextCodec
from splitspec.errors import ConfigError, InvalidRequestError
from tests.coordinator.conftest import SaveModel, byte_id, sentence_piece_codecs

KINDS = [
    "byte level",
    "byte fallback",
    "byte fallback, space kept",
    "metaspace",
    "word piece",
    "none",
]
#: Emoji, joined emoji, flags, combining marks, wide characters, and the replacement character itself.
FRAGMENTS = [
    *("😀", "👩\u200d👩\u200d👧", "🏴\u200d☠\ufe0f", "🇩🇪", "e\u0301", "日本", "한", "\ufffd"),
    *(" ", "  ", " Hello", "\n", "\x00", "STOP", "<think>"),
]
PROMPTS = [
    "Hello world",
    " two  spaces ",
    "naïve café 日本語 😀",
    "a\n\n\tb",
    "<|im_end|> inside <think>",
    "",
]


@dataclass(frozen=True)
class Message:
    role: str
    content: str


#: What SentencePiece tokenizers put before a text, in the ways that the library writes it.
SENTENCE_PIECE = sentence_piece_codecs()


def conversation(*messages: tuple[str, str]) -> list[Message]:
    return [Message(role, content) for role, content in messages]


CONVERSATIONS = [
    conversation(("user", "What is 2 + 2?")),
    conversation(("system", "Be brief."), ("user", "Hello 😀")),
    conversation(("user", " Hi\n"), ("assistant", "Hello."), ("user", "日本語 & <b>'quotes'</b>")),
    conversation(("system", ""), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
]


def oracle_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    chat = [{"role": message.role, "content": message.content} for message in messages]
    ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return ids


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> TextCodec:
    return TextCodec.load(demo_model)


@pytest.fixture(scope="module")
def demo_oracle(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.mark.model
@pytest.mark.parametrize("text", PROMPTS)
def test_the_demo_models_prompts(demo: TextCodec, demo_oracle: Any, text: str) -> None:
    assert demo.encode(text) == demo_oracle.encode(text)


@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_demo_models_chats(demo: TextCodec, demo_oracle: Any, messages: list[Message]) -> None:
    ids = demo.encode_chat(messages)
    assert ids == oracle_chat(demo_oracle, messages)
    assert "<|im_start|>" not in demo.decode(ids)
    assert demo.decode(ids) == demo_oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_the_demo_models_output(demo: TextCodec, ids: list[int]) -> None:
    assert incremental(demo, ids) == demo.decode(ids)


TEMPLATES = {
    "blocks": """
        {% for message in messages %}
            {%- if loop.index > 2 %}{% continue %}{% endif %}
            {% if message.role == 'system' %}
    S:{{ message.content | trim }}
            {% endif %}
        {% endfor %}
        {{ bos_token + messages[-1]['content'] }}{{ eos_token }}{{ sep_token }}
    """,
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=True) }}",
    "generation": "{% for m in messages %}{% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "undefined": "{{ tools is defined }}{{ tools is none }}{{ documents is none }}{{ pad_token is defined }}",
    "date": "{{ strftime_now('%Y') }}{% if add_generation_prompt %}<|user|>{% endif %}",
    "namespace": """{% set ns = namespace(n=0) %}
{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}
{{ ns.n }}""",
}
CONFIG: dict[str, Any] = {
    "bos_token": {"__type": "AddedToken", "content": "<|begin|>"},
    "eos_token": "<|end|>",
    "pad_token": None,
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("named", [False, True])
def test_templates_render_as_transformers_renders_them(
    save_model: SaveModel, template: str, named: bool
) -> None:
    choice = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    directory = save_model(CONFIG | {"chat_template": choice}) if named else save_model(CONFIG, template)
    codec, oracle = TextCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    for messages in CONVERSATIONS:
        assert codec.encode_chat(messages) == oracle_chat(oracle, messages)


def test_a_template_file_goes_before_the_config(save_model: SaveModel) -> None:
    codec = TextCodec.load(save_model({"chat_template": "config"}, "file"))
    assert codec.decode(codec.encode_chat(CONVERSATIONS[0])) == "file"


def test_prompts_get_the_tokenizers_special_tokens_and_chats_only_the_templates(
    save_model: SaveModel,
) -> None:
    """transformers too takes them from tokenizer.json alone, whatever the config says."""
    directory = save_model(CONFIG | {"add_bos_token": False}, "{{ bos_token }}{{ messages[0].content }}")
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    begin = tokenizer.token_to_id("<|begin|>")
    assert begin is not None
    tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    tokenizer.save(path)
    codec, oracle = TextCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in PROMPTS:
        assert codec.encode(text) == oracle.encode(text)
        assert codec.encode(text)[0] == begin
    assert codec.encode_chat(CONVERSATIONS[0]) == oracle_chat(oracle, CONVERSATIONS[0])
    assert codec.encode_chat(CONVERSATIONS[0]).count(begin) == 1


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("{{ raise_exception('no role robot') }}", conversation(("robot", "hi")), "no role robot"),
        ("{{ messages[3].content }}", conversation(("robot", "hi")), "no element 3"),
        ("{{ messages[0].content + 1 }}", conversation(("robot", "hi")), "concatenate"),
        ("{{ messages.append(1) }}", conversation(("robot", "hi")), "unsafe"),
        ("static", [], "at least one message"),
        (None, conversation(("robot", "hi")), "no chat template"),
    ],
)
def test_refused_messages_are_the_requests_fault(
    save_model: SaveModel, template: str | None, messages: list[Message], said: str
) -> None:
    codec = TextCodec.load(save_model({}, template))
    with pytest.raises(InvalidRequestError, match=said) as raised:
        codec.encode_chat(messages)
    assert raised.value.field == "chat.messages"
    assert str([message.role for message in messages]) in raised.value.message


WITHOUT = "{% if sep_token is defined %}x{% endif %}{{ bos_token }}{{ messages[0].content }}"


def test_a_token_that_no_file_defines_is_nothing_as_in_the_library(save_model: SaveModel) -> None:
    directory = save_model({}, WITHOUT)
    codec, oracle = TextCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    assert codec.encode_chat(CONVERSATIONS[0]) == oracle_chat(oracle, CONVERSATIONS[0])
    assert codec._template is not None
    assert codec._template.undefined == ["bos_token", "sep_token"]


@pytest.mark.parametrize(
    ("config", "template", "said"),
    [
        ({}, "{{ bos_token + messages[0].content }}", "bos_token, which none of the model's files defines"),
        ({"bos_token": "<new>"}, WITHOUT, "bos_token, which is '<new>' in the model's files"),
    ],
)
def test_a_token_that_a_template_can_t_do_without_is_the_fault_of_the_files(
    save_model: SaveModel, config: dict[str, Any], template: str, said: str
) -> None:
    codec = TextCodec.load(save_model(config, template))
    with pytest.raises(ConfigError, match=said) as raised:
        codec.encode_chat(CONVERSATIONS[0])
    assert raised.value.field == "chat"


def test_special_tokens_come_from_each_of_the_model_s_files(save_model: SaveModel) -> None:
    directory = save_model(
        {"eos_token": "<|end|>"}, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    )
    (directory / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|begin|>"}}')
    codec, oracle = TextCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    assert codec.encode_chat(CONVERSATIONS[0]) == oracle_chat(oracle, CONVERSATIONS[0])
    assert codec.encode_chat(CONVERSATIONS[0])[0] == begin_id(codec)


def test_what_only_another_file_calls_special_has_no_text(save_model: SaveModel) -> None:
    directory = save_model({})
    (directory / "special_tokens_map.json").write_text('{"bos_token": "b"}')
    codec, oracle = TextCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    ids = codec.encode("abc")
    assert ids == oracle.encode("abc")
    assert codec.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == "ac"


def test_named_templates_without_a_default_are_none(save_model: SaveModel) -> None:
    codec = TextCodec.load(save_model({"chat_template": [{"name": "tool_use", "template": "x"}]}))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        codec.encode_chat(CONVERSATIONS[0])


def test_a_broken_template_is_a_wrong_start_condition(save_model: SaveModel) -> None:
    directory = save_model({}, "a\n{% if %}")
    with pytest.raises(ConfigError, match="line 2") as raised:
        TextCodec.load(directory)
    assert str(directory) in raised.value.message


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_named(save_model: SaveModel, content: str) -> None:
    path = save_model() / "tokenizer_config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="expected a JSON object") as raised:
        TextCodec.load(path.parent)
    assert str(path) in raised.value.message


def incremental(codec: TextCodec, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    detokenizer = codec.detokenizer(prompt)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


def added(codec: TextCodec, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What ids add to a prompt's text, by decoding both as a whole."""
    before, whole = codec.decode(prompt), codec.decode([*prompt, *ids])
    same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    return whole[min(same, len(whole)) :]


BYTES = st.lists(st.sampled_from([0x00, 0x41, 0x80, 0x9F, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xFF]))


@pytest.mark.parametrize("kind", KINDS)
class TestDetokenizer:
    @given(data=st.data())
    def test_any_ids(self, codecs: dict[str, TextCodec], kind: str, data: st.DataObject) -> None:
        codec = codecs[kind]
        ids = st.lists(st.integers(0, codec.vocabulary.size + 2), max_size=40)
        prompt, output = data.draw(ids), data.draw(ids)
        assert incremental(codec, output) == codec.decode(output)
        assert incremental(codec, output, prompt) == added(codec, prompt, output)

    @given(
        parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12),
        copies=st.lists(st.integers(0, 2), max_size=40),
        share=st.integers(0, 100),
    )
    def test_text_with_tokens_lost_and_repeated(
        self, codecs: dict[str, TextCodec], kind: str, parts: list[str], copies: list[int], share: int
    ) -> None:
        """share: per cent of the tokens that are the prompt, wherever that cuts words and characters."""
        codec = codecs[kind]
        whole = codec.encode("".join(parts))
        times = chain(copies, repeat(1))
        broken = [token for token, count in zip(whole, times, strict=False) for _ in range(count)]
        for ids in (whole, broken):
            seam = len(ids) * share // 100
            assert incremental(codec, ids) == codec.decode(ids)
            assert incremental(codec, ids[seam:], ids[:seam]) == added(codec, ids[:seam], ids[seam:])

    @given(prompt=BYTES, output=BYTES)
    def test_bytes(
        self, codecs: dict[str, TextCodec], kind: str, prompt: list[int], output: list[int]
    ) -> None:
        codec = codecs[kind]
        before, broken = ([byte_id(codec, byte) for byte in part] for part in (prompt, output))
        assert incremental(codec, broken) == codec.decode(broken)
        assert incremental(codec, broken, before) == added(codec, before, broken)

    def test_time_is_linear(self, codecs: dict[str, TextCodec], kind: str) -> None:
        """Also while bytes stay invalid, in one long run of byte tokens, and behind a long prompt."""
        codec = codecs[kind]
        for ids in (
            [byte_id(codec, 0x80)] * 2000,
            [byte_id(codec, 0xE2)] * 2000,
            codec.encode(" Hello") * 2000,
            codec.encode(" ") * 2000,
        ):
            counting = Counting(codec)
            assert incremental(counting, ids) == codec.decode(ids)
            assert counting.decoded < 12 * len(ids)
        counting = Counting(codec)
        incremental(counting, ids[:1], codec.encode(" Hello") * 2000)
        assert counting.decoded < 50


class Counting(TextCodec):
    """Counts the ids that are decoded."""

    def __init__(self, codec: TextCodec) -> None:
        super().__init__(codec.vocabulary, None)
        self.decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids)


class TestTheSeam:
    """Where a prompt ends, on a tokenizer like Llama 2's: its decoder takes a text's first space away."""

    def test_the_first_word_keeps_its_space(self, codecs: dict[str, TextCodec]) -> None:
        codec = codecs["byte fallback"]
        assert incremental(codec, codec.encode(" world"), codec.encode("Hello")) == " world"
        assert incremental(codec, codec.encode("world")) == "world"

    def test_a_character_whose_first_bytes_ended_the_prompt_comes_whole(
        self, codecs: dict[str, TextCodec]
    ) -> None:
        for codec in (codecs["byte fallback"], codecs["byte level"]):
            *first, last = [byte_id(codec, byte) for byte in "€".encode()]
            assert incremental(codec, [last], first) == "€"
            # A character that doesn't go on was the prompt's own replacement character already.
            other = byte_id(codec, ord("a"))
            assert codec.decode([*first, other]) == codec.decode(first) + incremental(codec, [other], first)


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
class TestTextBehindText:
    @given(words=st.lists(st.sampled_from([" ", "a", "b", "Hello", "日", ",", "é"]), max_size=6))
    def test_nothing_is_put_before_it(self, kind: str, words: list[str]) -> None:
        codec, text = SENTENCE_PIECE[kind], "".join(words)
        before = codec.encode("Hello")
        more = codec.encode_more(text)
        assert codec.decode([*before, *more]) == codec.decode(before) + text
        assert begin_id(codec) not in more

    def test_at_the_beginning_of_a_session_the_library_decides(self, kind: str) -> None:
        codec = SENTENCE_PIECE[kind]
        assert codec.encode(" a")[0] == begin_id(codec)
        assert codec.encode_more(" a") == [codec.vocabulary.tokenizer.token_to_id("▁a")]


def begin_id(codec: TextCodec) -> int:
    found = codec.vocabulary.tokenizer.token_to_id("<|begin|>")
    assert found is not None
    return int(found)


class TestWhatIsReleasedWhen:
    def test_half_a_character_never(self, codecs: dict[str, TextCodec]) -> None:
        codec = codecs["byte level"]
        detokenizer = Detokenizer(codec)
        released = [detokenizer.push(byte_id(codec, byte)) for byte in "a😀b".encode()]
        assert released == ["a", "", "", "", "😀", "b"]

    def test_incomplete_bytes_at_the_end_become_a_replacement_character(
        self, codecs: dict[str, TextCodec]
    ) -> None:
        codec = codecs["byte level"]
        detokenizer = Detokenizer(codec)
        assert [detokenizer.push(byte_id(codec, byte)) for byte in b"a\xf0\x9f"] == ["a", "", ""]
        assert detokenizer.flush() == "\ufffd"

    def test_a_run_of_byte_tokens_waits_for_its_end(self, codecs: dict[str, TextCodec]) -> None:
        codec = codecs["byte fallback"]
        ids = [byte_id(codec, byte) for byte in "😀".encode()]
        comma = codec.vocabulary.tokenizer.token_to_id(",")
        assert comma is not None
        detokenizer = Detokenizer(codec)
        assert [detokenizer.push(token) for token in [*ids, comma]] == ["", "", "", "", "😀,"]
