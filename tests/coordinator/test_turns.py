"""Turns of a conversation in a session; the library's template over the whole conversation is the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coordinator.text import ChatTemplate, Conversation, Message, Prompt, TextCodec
from splitspec.errors import InvalidRequestError
from splitspec.vocabulary import Vocabulary

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<|user|>",
    "<|bot|>",
]


EOT = "<|eot|>"


def loop(body: str, end: str) -> str:
    return (
        "{% for m in messages %}" + body + "{% endfor %}{% if add_generation_prompt %}" + end + "{% endif %}"
    )


@dataclass(frozen=True)
class Shape:
    """A template in the shape that a family of models has, with the id that ends its answers.

    kept: answers stay as they were generated, so that a turn only adds to the session.
    """

    template: str
    end: str
    kept: bool = True


CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
WHO = "{% set who = 'bot' if m.role == 'assistant' else m.role %}"
THINK = "{% set said = m.content.split('</think>')[-1] | trim if m.role == 'assistant' else m.content %}"
SHAPES = {
    "ChatML": Shape(loop(CHATML, "<|im_start|>assistant\n"), "<|im_end|>"),
    "Llama 2": Shape(
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "Llama 3": Shape(
        "{{ bos_token }}"
        + loop(
            "<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>",
            "<|head|>{{ 'assistant' }}<|/head|>\n\n",
        ),
        "<|eot|>",
    ),
    "Mistral": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "Gemma": Shape(
        "{{ bos_token }}"
        + loop(
            "{% set who = 'model' if m.role == 'assistant' else m.role %}"
            "<|im_start|>{{ who }}\n{{ m.content | trim }}<|im_end|>\n",
            "<|im_start|>model\n",
        ),
        "<|im_end|>",
    ),
    "Phi-3": Shape(loop(WHO + "<|{{ who }}|>\n{{ m.content }}<|eot|>\n", "<|bot|>\n"), "<|eot|>"),
    "Zephyr": Shape(
        loop(
            "{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + eos_token + '\n' }}"
            "{% else %}{{ '<|bot|>\n' + m.content + eos_token + '\n' }}{% endif %}",
            "{{ '<|bot|>' }}",
        ),
        "</s>",
    ),
    "DeepSeek": Shape(
        "{{ bos_token }}"
        + loop(
            "{% if m.role == 'user' %}<|user|>{{ m.content }}"
            "{% else %}<|bot|>{{ m.content }}{{ eos_token }}{% endif %}",
            "<|bot|>",
        ),
        "</s>",
    ),
    "DeepSeek, thinking": Shape(
        loop(WHO + THINK + "<|{{ who }}|>{{ said }}</s>", "<|bot|><think>\n"), "</s>", kept=False
    ),
    "Qwen3": Shape(
        loop(
            THINK + "<|im_start|>{{ m.role }}\n"
            "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
            "{{ said }}<|im_end|>\n",
            "<|im_start|>assistant\n",
        ),
        "<|im_end|>",
    ),
    "the last two messages": Shape(
        "{% for m in messages[-2:] %}" + CHATML + "{% endfor %}<|im_start|>assistant\n",
        "<|im_end|>",
        kept=False,
    ),
    "upper case": Shape(
        loop(CHATML.replace("m.content", "m.content | upper"), "<|im_start|>assistant\n"),
        "<|im_end|>",
        kept=False,
    ),
}
ANSWERS = ["Yes.", "", "Two  words, 日本.", "lines\n\nand\n"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(*, prepend: bool) -> Tokenizer:
    """As Llama 2's: a space before a text, with `prepend` before each piece between special tokens."""
    merges = [("▁", letter) for letter in "YTlaHGo["]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"YTlaHGo[es.]INST/ndwri,", "\n"]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    if prepend:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level(),
    "metaspace": sentence_piece(prepend=False),
    "prepend": sentence_piece(prepend=True),
}
for each in TOKENIZERS.values():
    # As Phi-3's, one takes the white space behind it along.
    each.add_special_tokens(
        [AddedToken(text, rstrip=text == "<|eot|>", normalized=False) for text in SPECIAL]
    )


class Talk:
    """A conversation in a session, as the service holds it, and what the library says of it."""

    def __init__(self, tokenizer: Tokenizer, shape: Shape) -> None:
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        self.codec = TextCodec(Vocabulary.of(tokenizer), ChatTemplate(shape.template, names))
        library: Any = PreTrainedTokenizerFast
        self.library = library(tokenizer_object=tokenizer, chat_template=shape.template, **names)
        self.end = token_id(tokenizer, shape.end)
        self.messages: tuple[Message, ...] = ()
        self.ids: list[int] = []
        self.answer_start = 0

    def oracle(self) -> list[int]:
        chat = [{"role": message.role, "content": message.content} for message in self.messages]
        ids: list[int] = self.library.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids

    def ask(self, text: str) -> Prompt:
        question = [Message("user", text)]
        if self.messages:
            earlier = Conversation(self.messages, self.answer_start)
            prompt = self.codec.next_turn(question, self.ids, earlier, frozenset())
        else:
            prompt = Prompt(0, self.codec.encode_chat(question), tuple(question))
        assert prompt.messages is not None
        self.messages = prompt.messages
        self.ids = [*self.ids[: prompt.start], *prompt.token_ids]
        self.answer_start = len(self.ids)
        return prompt

    def answer(self, text: str, *, ended: bool = True) -> None:
        self.ids += [*self.codec.encode_more(text), *([self.end] if ended else [])]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def without_spaces(codec: TextCodec, ids: Sequence[int]) -> str:
    return "".join("".join(codec.special_text(token) for token in ids).split())


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class TestWholeConversation:
    @pytest.mark.parametrize("ended", [True, False])
    def test_turns_are_the_library_s_tokens_of_all_of_it(
        self, tokenizer: Tokenizer, shape: Shape, ended: bool
    ) -> None:
        """Behind answers that are kept a turn's own tokens are the last of the library's; else all are."""
        talk = Talk(tokenizer, shape)
        talk.ask("Hi")
        assert talk.ids == talk.oracle()
        for answer in ANSWERS:
            talk.answer(answer, ended=ended)
            length = len(talk.ids)
            prompt = talk.ask("Go on")
            if not shape.kept:
                assert talk.ids == talk.oracle()
                continue
            assert prompt.start == length
            assert prompt.token_ids == talk.oracle()[-len(prompt.token_ids) :]
            assert without_spaces(talk.codec, talk.ids) == without_spaces(talk.codec, talk.oracle())

    def test_an_end_that_the_template_doesn_t_know_gives_way_to_its_own(
        self, tokenizer: Tokenizer, shape: Shape
    ) -> None:
        talk = Talk(tokenizer, shape)
        talk.ask("Hi")
        talk.end = token_id(tokenizer, "<|head|>")
        talk.answer("Yes.")
        prompt = talk.ask("Go on")
        assert prompt.token_ids == talk.oracle()[-len(prompt.token_ids) :]
        assert without_spaces(talk.codec, talk.ids) == without_spaces(talk.codec, talk.oracle())


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek, thinking"])
def test_what_a_template_takes_out_of_an_answer_is_fed_anew(name: str) -> None:
    talk = Talk(TOKENIZERS["byte level"], SHAPES[name])
    talk.ask("Hi")
    length = len(talk.ids)
    talk.answer("<think>\nWell\n</think>\n\nYes.")
    prompt = talk.ask("Go on")
    assert talk.ids == talk.oracle()
    # All before the answer is still there.
    assert length - len("<think>\n") <= prompt.start <= length


def test_kept_answers_keep_their_own_tokens() -> None:
    """Also where the library would have cut their text otherwise."""
    talk = Talk(TOKENIZERS["metaspace"], SHAPES["ChatML"])
    talk.ask("Hi")
    generated = [token_id(TOKENIZERS["metaspace"], piece) for piece in ("▁", "Y", "e", "s")]
    talk.ids += [*generated, talk.end]
    before = list(talk.ids)
    talk.ask("Go on")
    assert talk.ids[: len(before)] == before
    assert talk.ids != talk.oracle()


def test_behind_text_that_is_no_conversation() -> None:
    talk = Talk(TOKENIZERS["byte level"], SHAPES["Llama 2"])
    text = [*talk.codec.encode("Once upon a time."), talk.end]
    more = talk.codec.encode_turn([Message("user", "Go on")], text)
    assert more == talk.codec.encode_chat([Message("user", "Go on")])
    cut = talk.codec.encode_turn([Message("user", "Go on")], text[:-1])
    assert cut == [*talk.codec.encode_more(" "), talk.end, *more]
    only_last = Talk(TOKENIZERS["byte level"], SHAPES["the last two messages"])
    assert only_last.codec.encode_turn([Message("user", "Go on")], text)
    nothing_earlier = SHAPES["the last two messages"].template.replace("-2", "-1")
    codec = Talk(TOKENIZERS["byte level"], Shape(nothing_earlier, "<|im_end|>")).codec
    with pytest.raises(InvalidRequestError, match="other text, which the model's template can't continue"):
        codec.encode_turn([Message("user", "Go on")], text)
