#!/usr/bin/env python3
"""Distils an MTP head (multi-token prediction) for a checkpoint of Qwen3.5-MoE, on a GPU if there is one.

    python scripts/train_mtp.py CHECKPOINT CORPUS.jsonl.xz OUTPUT.safetensors [--minutes 5]

CHECKPOINT: a folder that transformers reads. CORPUS: a JSON a line, with `text`. OUTPUT gets the tensors `mtp.*` in bf16, as Qwen's own checkpoints name them; put it beside the
checkpoint's other safetensors. The head begins as a copy of the model's last layer. It learns the distribution that the model itself has one token later, where it is right and where it
is wrong: what counts for drafts is what the model will say. Every so often it says how often the head's likeliest token is the model's, over the latest batches, before it learns from them.
"""
import argparse
import itertools
import json
import lzma
import math
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

WINDOW, DEVICE = 512, "cuda" if torch.cuda.is_available() else "cpu"


class Head(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        config, text = model.config, model.model
        last = len(text.layers) - 1
        assert config.layer_types[last] == "full_attention"
        norm, layer = type(text.norm), type(text.layers[last])
        hidden = config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(hidden, eps=config.rms_norm_eps) for _ in range(3))
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = torch.nn.ModuleList([layer(config, last)])
        self.layers[0].load_state_dict(text.layers[last].state_dict())
        self.norm.load_state_dict(text.norm.state_dict())
        with torch.no_grad():
            # The state passes as it is, at first.
            self.fc.weight.normal_(0, 0.02)
            self.fc.weight[:, hidden:] += torch.eye(hidden)

    def forward(self, model, tokens, states):
        """tokens: [batch, n], and states: [batch, n, hidden] of the tokens before them."""
        embedded = self.pre_fc_norm_embedding(model.model.embed_tokens(tokens))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(states)], dim=-1))
        positions = torch.arange(tokens.shape[1], device=tokens.device).view(1, 1, -1).expand(3, tokens.shape[0], -1)
        angles = model.model.rotary_emb(x, positions)
        # Without a mask its attention is causal.
        return self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=None, position_ids=positions[0]))


def windows(path, tokenizer):
    """Windows of tokens, without end, of documents in another order each time."""
    end = tokenizer.token_to_id("<|endoftext|>")
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for seed in itertools.count():
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
        rest = []
        for first in range(0, len(order), 1024):
            for encoding in tokenizer.encode_batch([texts[i] for i in order[first:first + 1024]]):
                rest += encoding.ids + [end]
            # Long documents give many windows, which follow each other here: a batch mixes them.
            whole = [rest[at:at + WINDOW] for at in range(0, len(rest) - WINDOW, WINDOW)]
            rest = rest[len(whole) * WINDOW:]
            for at in torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed)).tolist():
                yield whole[at]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("corpus")
    parser.add_argument("output")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--batch", type=int, default=32, help="windows of 512 tokens a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval().requires_grad_(False).to(DEVICE)
    tokenizer = Tokenizer.from_file(f"{args.checkpoint}/tokenizer.json")
    head = Head(model).to(DEVICE)
    optimiser = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    data = windows(args.corpus, tokenizer)
    begun, step, agreed, loss_mean = time.monotonic(), 0, 0.5, 3.0
    while (elapsed := time.monotonic() - begun) < args.minutes * 60:
        for group in optimiser.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / 50) * (0.01 + 0.99 * (1 + math.cos(math.pi * elapsed / (args.minutes * 60))) / 2)
        tokens = torch.tensor(list(itertools.islice(data, args.batch)), device=DEVICE)
        with torch.no_grad():
            states = model.model(input_ids=tokens, use_cache=False).last_hidden_state
            target = model.lm_head(states[:, 1:])
        # The entry of a token is made of it and of the state before it; it says what comes behind it.
        out = model.lm_head(head(model, tokens[:, 1:], states[:, :-1]))
        loss = F.kl_div(out.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="sum") / target[..., 0].numel()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        share = (out.argmax(-1) == target.argmax(-1)).float().mean()
        agreed, loss_mean, step = agreed + (share - agreed) * 0.05, loss_mean + (loss.detach() - loss_mean) * 0.05, step + 1
        if step % 25 == 0:
            print(f"{elapsed:6.0f} s, {step * args.batch * WINDOW:9} tokens: divergence {float(loss_mean):.3f}, same likeliest token {100 * float(agreed):.1f} %", flush=True)
    save_file({f"mtp.{name}": tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}, args.output, metadata={"format": "pt"})


main()
