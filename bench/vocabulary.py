"""A vocabulary for random-weight models that are to be served: byte-level BPE of any size from 1,024 tokens on, as Qwen3's is built, so that every server reads it and a
word of `sluice bench serve` is one token or two. All bytes first, then pairs of letters, then pairs of these, in an order that is nobody's language. Standard library only."""

import itertools
import json

# Where Qwen3 has its control tokens; a smaller vocabulary has them at its end.
CONTROL_AT = 151_643
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# As Qwen2's and Qwen3's tokenizer.json have it.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def bytes_as_letters():
    """The letter that stands for each byte, as GPT-2 has it."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (b for b in range(256) if b not in plain)
    return [chr(b) for b in plain] + [chr(256 + i) for i, _ in enumerate(rest)]


def vocabulary(size):
    """(`size` tokens by id, merges, ids of CONTROLS)."""
    controls = min(CONTROL_AT, size - len(CONTROLS))
    tokens, merges = bytes_as_letters(), []
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in letters for b in letters]
    # A space in front.
    words = (("Ġ", a + b) for a, b in pairs)
    fours = ((a + b, c + d) for (a, b), (c, d) in itertools.product(pairs, pairs))
    for a, b in itertools.chain(pairs, words, fours):
        if len(tokens) == controls:
            break
        tokens.append(a + b)
        merges.append((a, b))
    assert len(tokens) == controls, f"no {size} tokens can be made"
    ids = list(range(controls, controls + len(CONTROLS)))
    tokens += CONTROLS
    tokens += [f"<|unused{i}|>" for i in range(size - len(tokens))]
    return tokens, merges, ids


def write_beside(folder, size):
    """tokenizer.json and tokenizer_config.json for a folder of safetensors."""
    tokens, merges, controls = vocabulary(size)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [{"id": i, "content": t, "special": i in controls} for i, t in enumerate(tokens) if i >= controls[0]]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**a, **flags} for a in added],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}, level]},
        "post_processor": level,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "unk_token": None, "vocab": {t: i for i, t in enumerate(tokens[: controls[0]])}, "merges": merges},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": CONTROLS[2], "pad_token": CONTROLS[0], "bos_token": None, "chat_template": TEMPLATE}
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        with open(f"{folder}/{name}", "w") as f:
            json.dump(content, f)


def add_to(writer, size):
    """The same into a GGUF file's header, by `gguf.GGUFWriter`."""
    import gguf

    tokens, merges, controls = vocabulary(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if i in controls else gguf.TokenType.USER_DEFINED if i > controls[-1] else gguf.TokenType.NORMAL for i in range(size)]
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_eos_token_id(controls[2])
    writer.add_pad_token_id(controls[0])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
