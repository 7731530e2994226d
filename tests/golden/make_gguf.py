#!/usr/bin/env python3
"""Reference values of three real models in GGUF, by transformers in float32 on the dequantised weights, and by llama.cpp on the file as it is.

    python tests/golden/make_gguf.py FOLDER HELDOUT [--only NAME] [--part PART] [--by REFERENCE]

FOLDER holds the files that MODELS names; HELDOUT is the demo checkpoint's heldout.txt. Writes `real/NAME.json`:
  tokenization  number and FNV-1a hash of the token ids of texts, by llama.cpp;
  logits        of a few prompts some rows: the best 32, and every so many-th of the vocabulary; `range` is the greatest less the least logit of the whole prompt;
  greedy        64 tokens after each of ten prompts (an end of text does not stop them), with the gap between the best two logits at each step, by both;
  perplexity    nats of the first windows of 512 tokens of HELDOUT, as `sluice eval ppl` cuts and scores them, by both. Where the tokenizer adds a BOS, it takes the
                place of each window's first token, as in llama-perplexity.

Needs requirements-gguf.txt beside requirements.txt. Takes half an hour on one core.
"""
import argparse
import hashlib
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE / "real"
MODELS = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m.Q4_K_M.gguf",
    "qwen2_5_coder": "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf",
}
GREEDY_TOKENS, TOP, SAMPLED = 64, 32, 257
WINDOW, WINDOWS = 512, 16
REFERENCES = ("transformers", "llama_cpp")
PARTS = ("tokenization", "logits", "greedy", "perplexity")


def chat(user, system="You are a helpful assistant."):
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


PLAIN = [
    "The capital of France is",
    "Once upon a time there was a little girl named Lily. She",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "A café in Zürich, 1923 – “naïve”, she said: 日本語と中文 🙂\n\nIn geology, a volcano is",
    "Q: Which planet is known as the red planet?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "The old fisherman pulled his boat up on the sand and looked at the sky. \"A storm is coming,\" he",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "Die Hauptstadt von Deutschland ist",
    "SELECT name, COUNT(*) FROM users WHERE",
]
CHATS = [
    chat("What is 3 + 4?"),
    chat("Tell me a short story about a fox and a crow."),
    chat("Write a Python function that reverses a linked list."),
    chat("Do penguins live at the North Pole?", system="Answer briefly."),
    chat("Explain what a hash table is."),
]
# Beside the prompts: white space, digits, scripts, control tokens and what only looks like them. (Without `</s>`, which llama.cpp takes for a control token wherever it is in a
# vocabulary: in Qwen's it is an ordinary one; and without decomposed letters, which Qwen's own
# tokenizer composes and llama.cpp does not.)
TEXTS = [
    *PLAIN,
    *CHATS,
    "  leading,   inner\t\ttabs \n\n\n  and trailing   ",
    "1234567890 3.14159 0x1F 12,345 ½ ²³ Ⅻ",
    "Ελληνικά Русский العربية עברית हिन्दी ไทย 한국어 ひらがな カタカナ 漢字",
    "\u00e9 👩‍👩‍👧‍👦 🇩🇪 \ufeff \u200b \u00a0 \u3000x",
    "don't DON'T we'll I'M it's «quoted» … — ´`",
    "<|im_start|>not<|im_end|> <bos> <start_of_turn> <|endoftext|> <unused5> [INST]",
    "if (a && b || !c) { return x->y[i++] * 2; } // ok\r\n\r\n",
]


def fnv(ids):
    """FNV-1a, 64 bits, of the ids as little-endian u32."""
    h = 0xCBF29CE484222325
    for byte in b"".join(i.to_bytes(4, "little") for i in ids):
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def prompts(name):
    return PLAIN if name == "gemma3" else PLAIN[:5] + CHATS


def nats(logits, following):
    """Mean -log softmax of each next token, in f64."""
    import numpy as np

    rows = logits.astype(np.float64)
    top = rows.max(axis=1)
    return float(np.mean(top + np.log(np.exp(rows - top[:, None]).sum(axis=1)) - rows[np.arange(len(rows)), following]))


class Transformers:
    def __init__(self, path):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager").eval()
        self.cache = None

    def clear(self):
        self.cache = None

    def feed(self, ids, all_rows=False):
        with self.torch.no_grad():
            out = self.model(input_ids=self.torch.tensor([ids]), past_key_values=self.cache, use_cache=True, logits_to_keep=0 if all_rows else 1)
        self.cache = out.past_key_values
        return out.logits[0].numpy()


def greedy(model, ids):
    """The tokens, and the gap between the best two at each step."""
    import numpy as np

    if model is None:
        return None
    model.clear()
    tokens, gaps, step = [], [], ids
    for _ in range(GREEDY_TOKENS):
        row = model.feed(step)[-1]
        # Of equal ones the first.
        best = int(np.argmax(row))
        tokens.append(best)
        gaps.append(round(float(row[best] - np.partition(row, -2)[-2]), 5))
        step = [best]
    return {"ids": tokens, "gaps": gaps}


def logits(reference, ids, wanted):
    import numpy as np

    reference.clear()
    table = reference.feed(ids, all_rows=True)
    stride = table.shape[1] // SAMPLED
    rows = []
    for position in wanted:
        row = table[position]
        best = np.argsort(-row, kind="stable")[:TOP]
        number = lambda x: float(f"{x:.7g}")  # noqa: E731
        rows.append({"position": position, "top": [[int(i), number(row[i])] for i in best], "sampled": [number(x) for x in row[::stride][:SAMPLED]]})
    return {"ids": ids, "range": float(table.max() - table.min()), "stride": stride, "rows": rows}


def perplexity(model, windows):
    if model is None:
        return None
    found = []
    for window in windows:
        model.clear()
        found.append(round(nats(model.feed(window, all_rows=True)[:-1], window[1:]), 7))
        print(f"  window {len(found)}: {found[-1]}", flush=True)
    return found


def make(name, path, heldout, parts, by):
    import importlib.metadata

    import llama_cpp_reference

    out = OUT / f"{name}.json"
    known = json.loads(out.read_text()) if out.exists() else {}
    llama = llama_cpp_reference.Model(path)
    begin = [llama.bos()] if llama.adds_bos() else []
    known |= {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "transformers")} | {"llama-cpp-python": llama_cpp_reference.api.__version__},
        "vocabulary": llama.vocabulary,
        "begin": begin,
    }
    if "tokenization" in parts:
        texts = TEXTS + [(HERE.parent.parent / "LICENSE-APACHE").read_text()]
        ids = [llama.tokens(text) for text in texts]
        known["tokenization"] = [{"text": t if len(t) < 1000 else "LICENSE-APACHE", "tokens": len(i), "fnv": fnv(i)} for t, i in zip(texts, ids)]
    reference = Transformers(path) if "transformers" in by and set(parts) != {"tokenization"} else None
    theirs = llama if "llama_cpp" in by else None
    if "logits" in parts and reference:
        long = llama.tokens((HERE.parent.parent / "LICENSE-APACHE").read_text())[:700]
        cases = [(begin + llama.tokens(text), lambda n: [0, n // 2, n - 1]) for text in (PLAIN[3], prompts(name)[-1])]
        # Longer than Gemma's window.
        cases.append((begin + long, lambda n: [255, 511, 512, 640, n - 1]))
        known["logits"] = [logits(reference, ids, rows(len(ids))) for ids, rows in cases]
    if "greedy" in parts:
        cases, before = [], {case["prompt"]: case for case in known.get("greedy", [])}
        for prompt in prompts(name):
            ids = begin + llama.tokens(prompt)
            kept = before.get(prompt, {})
            if kept and kept["ids"] != ids:
                raise SystemExit(f"{name}: other ids than before: {prompt!r}")
            found = {"transformers": greedy(reference, ids), "llama_cpp": greedy(theirs, ids)}
            cases.append({"prompt": prompt, "ids": ids} | {which: value or kept.get(which) for which, value in found.items()})
            a, b = (cases[-1][which] and cases[-1][which]["ids"] for which in found)
            same = next((i for i, (x, y) in enumerate(zip(a or [], b or [])) if x != y), GREEDY_TOKENS)
            print(f"  {name}: {same} tokens alike: {prompt[:40]!r}", flush=True)
        known["greedy"] = cases
    if "perplexity" in parts:
        ids, kept = llama.tokens(heldout.read_text()), known.get("perplexity", {})
        windows = [begin + ids[i + len(begin) : i + WINDOW] for i in range(0, WINDOW * WINDOWS, WINDOW)]
        found = {"transformers": perplexity(reference, windows), "llama_cpp": perplexity(theirs, windows)}
        found = {which: value or kept.get(which) for which, value in found.items()}
        known["perplexity"] = {"text": heldout.name, "text_tokens": len(ids), "fnv": fnv(ids), "window": WINDOW, **found}
    OUT.mkdir(exist_ok=True)
    out.write_text(pretty(known))


def pretty(value):
    """JSON, a line for each item of a list of objects."""
    lines = []
    for key, item in value.items():
        if isinstance(item, list) and item and isinstance(item[0], dict):
            inner = ",\n".join(json.dumps(x, ensure_ascii=False) for x in item)
            lines.append(f"{json.dumps(key)}: [\n{inner}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(item, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--part", choices=PARTS, action="append", help="make these parts anew and keep the others")
    parser.add_argument("--by", choices=REFERENCES, action="append", help="of these references, and keep the values of the other")
    args = parser.parse_args()
    for name, file in MODELS.items():
        if args.only in (None, name):
            print(name, flush=True)
            make(name, args.folder / file, args.heldout, args.part or PARTS, args.by or REFERENCES)


if __name__ == "__main__":
    main()
