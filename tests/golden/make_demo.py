#!/usr/bin/env python3
"""Reference values of the demo checkpoint, by transformers in float32.

    python tests/golden/make_demo.py ../shared/demo-model [greedy] [ppl]

Writes beside this file
  demo-greedy.json  ten prompts with their token ids and the 128 greedy tokens after each (end-of-text tokens do not stop it), and at each step
                    the gap between the best and the second best logit, so that a near-tie is visible;
  demo-ppl.json     nats per token on heldout.txt, in non-overlapping windows of 512 tokens, with 8, 6, 4 and 3 experts per token.

The weights are those of the file (bf16), widened to float32; eager attention; no fused kernels. README.md says how to make the environment.
"""
import json
import sys
import time
from pathlib import Path

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
GREEDY_TOKENS = 128
WINDOW = 512
EXPERTS = (8, 6, 4, 3)


def chat(user, system=None):
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{head}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = [
    "Once upon a time there was a little girl named Lily. She",
    "The old fisherman pulled his boat up on the sand and looked at the sky. \"A storm is coming,\" he",
    chat("What is 3 + 4?"),
    chat("Tom has 7 apples and gives 2 to Anna. How many apples does he have left?"),
    chat("Tell me a short story about a fox and a crow."),
    chat("Do penguins live at the North Pole?", system="Answer briefly."),
    "The capital of France is",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "Question: Which planet is known as the red planet?\nAnswer:",
    "A café in Zürich, 1923 – “naïve”, she said: 日本 🙂\n\nIn geology, a volcano is",
]


def load(folder):
    """The checkpoint with its stored weights widened to float32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model, tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def versions():
    return {"torch": torch.__version__, "transformers": transformers.__version__, "tokenizers": tokenizers.__version__}


@torch.no_grad()
def greedy(folder):
    model, tokenizer = load(folder)
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        output, gaps, cache, step = [], [], None, ids
        for _ in range(GREEDY_TOKENS):
            out = model(input_ids=torch.tensor([step]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            best = torch.topk(out.logits[0, -1], 2)
            output.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 5))
            step = output[-1:]
        # The same tokens must win in one forward pass without a cache.
        whole = model(input_ids=torch.tensor([ids + output]), use_cache=False).logits[0]
        again = whole[len(ids) - 1:-1].argmax(-1).tolist()
        cases.append({"prompt": prompt, "prompt_ids": ids, "output_ids": output, "output": tokenizer.decode(output, skip_special_tokens=False),
                      "min_gap": min(gaps), "gaps": gaps, "same_without_cache": again == output})
        print(f"{len(ids):3} tokens, smallest gap {min(gaps):.5f}, same without cache {again == output}: {cases[-1]['output'][:70]!r}", flush=True)
    lines = [f'"versions": {json.dumps(versions())}', f'"greedy_tokens": {GREEDY_TOKENS}',
             '"cases": [\n' + ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases) + "\n]"]
    (HERE / "demo-greedy.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


@torch.no_grad()
def perplexity(folder):
    text = (Path(folder) / "heldout.txt").read_text()
    result = {"versions": versions(), "text": "heldout.txt", "window": WINDOW, "experts": {}}
    for experts in EXPERTS:
        model, tokenizer = load(folder)
        for layer in model.model.layers:
            layer.mlp.gate.top_k = experts
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        windows = [ids[i:i + WINDOW] for i in range(0, len(ids), WINDOW)]
        tail = windows.pop() if len(windows[-1]) < WINDOW else []
        start, nats = time.time(), []
        for i in range(0, len(windows), 4):
            batch = torch.tensor(windows[i:i + 4])
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1), reduction="none")
            nats += loss.double().view(len(batch), -1).mean(1).tolist()
        tail_nats = None
        if len(tail) > 1:
            logits = model(input_ids=torch.tensor([tail]), use_cache=False).logits[0, :-1]
            tail_nats = float(torch.nn.functional.cross_entropy(logits, torch.tensor(tail[1:]), reduction="none").double().mean())
        whole, predictions = sum(nats) * (WINDOW - 1), len(nats) * (WINDOW - 1)
        with_tail = (whole + (tail_nats or 0) * max(len(tail) - 1, 0)) / (predictions + max(len(tail) - 1, 0))
        result["tokens"] = len(ids)
        result["full_windows"] = len(windows)
        result["tail_tokens"] = len(tail)
        result["experts"][str(experts)] = {
            "nats_per_token": round(with_tail, 6), "nats_per_token_full_windows": round(whole / predictions, 6),
            "nats_first_8_windows": round(sum(nats[:8]) / 8, 6), "tail_nats": tail_nats, "windows": [round(n, 6) for n in nats]}
        print(f"{experts} experts: {with_tail:.4f} nats ({whole / predictions:.4f} over whole windows), {time.time() - start:.0f} s", flush=True)
    experts = result.pop("experts")
    head = "".join(f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in result.items())
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in experts.items())
    (HERE / "demo-ppl.json").write_text("{\n" + head + '"experts": {\n' + lines + "\n}}\n")


if __name__ == "__main__":
    what = sys.argv[2:] or ["greedy", "ppl"]
    if "greedy" in what:
        greedy(sys.argv[1])
    if "ppl" in what:
        perplexity(sys.argv[1])
