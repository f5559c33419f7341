"""Special tokens that a model's files don't name because its tokenizer's class has them by default.

The classes and the choice among them are the transformers library's (AutoTokenizer); a table, since a
coordinator doesn't load that library. tests/test_special_tokens.py compares both.
"""

from __future__ import annotations

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_END = "<|endoftext|>"
#: Defaults by class, in the order of _NAMES.
_DEFAULTS: dict[str, tuple[str | None, ...]] = {
    "CodeLlamaTokenizer": ("<s>", "</s>", "<unk>"),
    "CohereTokenizer": (
        *("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<UNK>", "<SEP>", "<PAD>", "<CLS>", "<MASK_TOKEN>"),
    ),
    "GPT2Tokenizer": (_END, _END, _END),
    "GPTNeoXTokenizer": (_END, _END, _END, None, "<|padding|>"),
    "GemmaTokenizer": ("<bos>", "<eos>", "<unk>", None, "<pad>", None, "<mask>"),
    "LlamaTokenizer": ("<s>", "</s>", "<unk>"),
    "Qwen2Tokenizer": (None, _END, _END, None, _END),
    "Qwen3_5Tokenizer": (None, _END, _END, None, _END),
    "XGLMTokenizer": ("<s>", "</s>", "<unk>", "</s>", "<pad>", "<s>"),
}
#: The class that the library has for a model type, where it has one. TokenizersBackend has no defaults.
_CLASS_OF_TYPE = {
    model_type: name
    for name, types in {
        "CohereTokenizer": "cohere cohere2",
        "GPT2Tokenizer": "codegen dbrx emu3 gpt2 gpt_neo gptj jais2 opt phi starcoder2",
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma zaya",
        "Qwen2Tokenizer": "dots3_note moss_transcribe_diarize qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next",
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
        "TokenizersBackend": (
            "beam bigbird_pegasus got_ocr2 xlm-roberta-xl "
            "ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite gpt_bigcode granite "
            "granitemoe granitemoehybrid granitemoeshared hyperclovax internlm3 iquestcoder jamba "
            "kimi_linear mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral "
            "modernbert-decoder nemotron olmo2 olmo3 olmo_hybrid persimmon phi3 phimoe stablelm"
        ),
        "XGLMTokenizer": "xglm",
    }.items()
    for model_type in types.split()
}
#: Model types whose files often name a wrong class, among those above.
_WRONG_IN_FILES = {
    *("ernie4_5", "ernie4_5_moe", "fuyu", "hyperclovax", "internlm3", "iquestcoder", "jamba", "minicpm3"),
    *("minimax_m2", "modernbert-decoder", "nemotron", "phi3", "phimoe"),
    *("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"),
}


def class_defaults(class_name: str | None, model_type: str, *, byte_level: bool) -> dict[str, str]:
    """The named special tokens of the class that the library loads; empty for one without defaults.

    class_name: that of the model's files, None without one. model_type: of its config.json. byte_level:
    whether tokenizer.json is, which the library doesn't load as LlamaTokenizer.
    """
    ours = _CLASS_OF_TYPE.get(model_type)
    theirs = class_name.removesuffix("Fast") if class_name else None
    distrusted = model_type in _WRONG_IN_FILES
    if theirs == "LlamaTokenizer" and byte_level and not distrusted:
        return {}
    chosen = theirs or ours
    if ours is not None and theirs not in (None, ours) and (distrusted or ours == "TokenizersBackend"):
        chosen = ours
    defaults = _DEFAULTS.get(chosen or "", ())
    return {name: token for name, token in zip(_NAMES, defaults, strict=False) if token}
