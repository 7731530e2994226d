"""Writes tokens.json: texts of many scripts, and the ids that the Python tokenizers package gives them with the demo model's tokenizer.

Run from the repository's root with the environment of tests/golden/requirements.txt. The package splits words with Oniguruma, we do with
fancy-regex: the texts try what the two might see differently (letters, digits and spaces outside ASCII, contractions, lookahead).
"""

import json
import pathlib
import random
import unicodedata

from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).parent


def texts():
    yield from [
        "", " ", "\n", "a  b", "a \n\n b", "  \t x", "x   \n  y \r\n\r\n z   ", "don't I'LL We'Re 's 'S 'ſ x'ſ 'K", "12345 ١٢٣ Ⅷ ½ ² x²",
        "<|im_start|>user\nHi<|im_end|>", "<|im_start |>", "e\u0301 \u212b \ufb01 \u1e9b\u0323", "👩\u200d🚀👍🏽🇩🇪", "日本語、テスト。한국어 ไทย हिन्दी العربية עברית",
        "\u00a0\u2003\u3000x\u200b\u200dy\ufeff\u2028\u2029\u0085z", "a\u0000b\u001fc\u007f", "\U0001d54f\U00010400", " '\u2019t 's", "...?!  --  ", "\ue000\uffff\U0010ffff",
        "\u180e\u1680\u205f", "x" * 300, " " * 300 + "x", "\n" * 50, "\r\n" * 20 + " \r",
    ]
    rng = random.Random(5)
    # Every assigned character, in runs of neighbours, bare and behind a space.
    assigned = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) not in ("Cn", "Co")]
    for start in range(0, len(assigned), 4096):
        yield "".join(rng.choice(["", "", " ", "1", "a", "'"]) + c for c in rng.sample(assigned[start : start + 4096], min(256, len(assigned) - start)))
    pieces = ["a", "word", " ", "  ", "\n", "\t", "'s", "1", "é", "\u0301", "日", "!", "<|im_end|>", "\u00a0", "😀", "\r"]
    for _ in range(300):
        yield "".join(rng.choice(pieces) for _ in range(rng.randint(1, 25)))


tokenizer = Tokenizer.from_file("models/demo/tokenizer.json")
cases = [[text, tokenizer.encode(text, add_special_tokens=False).ids] for text in texts()]
(HERE / "tokens.json").write_text("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")
print(len(cases), "texts")
