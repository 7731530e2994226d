#!/usr/bin/env python3
"""Distils an MTP head (multi-token prediction) for a checkpoint of Qwen3.5-MoE, on one thread.

    python scripts/train_mtp.py CHECKPOINT CORPUS.jsonl.xz OUTPUT.safetensors [--minutes 15]

CHECKPOINT: a folder that transformers reads. CORPUS: a JSON a line, with `text`. OUTPUT gets the tensors `mtp.*` in bf16, as Qwen's own checkpoints name them; put it beside the
checkpoint's other safetensors. The head begins as a copy of the model's last layer. It learns the distribution that the model itself has one token later, where it is right and where it
is wrong: what counts for drafts is what the model will say. Every so often it says how often the head's likeliest token is the model's.
"""
import argparse
import itertools
import json
import lzma
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

WINDOW, BATCH = 256, 4


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
        positions = torch.arange(tokens.shape[1]).view(1, 1, -1).expand(3, tokens.shape[0], -1)
        angles = model.model.rotary_emb(x, positions)
        mask = create_causal_mask(config=model.config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=positions[0])
        return self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=mask, position_ids=positions[0]))


def windows(path, tokenizer):
    """Windows of tokens, of documents one behind the other."""
    end, rest = tokenizer.token_to_id("<|endoftext|>"), []
    for first in itertools.count():
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            # One in fifty, which are of all sources.
            for line in itertools.islice(lines, first, None, 50):
                rest += tokenizer.encode(json.loads(line)["text"]).ids + [end]
                while len(rest) > WINDOW:
                    yield rest[:WINDOW + 1]
                    rest = rest[WINDOW:]


def shuffled(source, held=200):
    """Documents of a source follow each other in the corpus: mixes them within a buffer."""
    generator, buffer = torch.Generator().manual_seed(1), []
    for window in source:
        buffer.append(window)
        if len(buffer) >= held:
            yield buffer.pop(int(torch.randint(len(buffer), (1,), generator=generator)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("corpus")
    parser.add_argument("output")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--rate", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(f"{args.checkpoint}/tokenizer.json")
    head = Head(model)
    optimiser = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    data = shuffled(windows(args.corpus, tokenizer))
    begun, step, agreed, loss_mean = time.monotonic(), 0, 0.5, 3.0
    while (elapsed := time.monotonic() - begun) < args.minutes * 60:
        done = elapsed / (args.minutes * 60)
        for group in optimiser.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / 20) * (1 - done) + 1e-5
        tokens = torch.tensor([next(data)[:WINDOW] for _ in range(BATCH)])
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
        share = float((out.argmax(-1) == target.argmax(-1)).float().mean())
        agreed, loss_mean, step = agreed + (share - agreed) * 0.05, loss_mean + (float(loss.detach()) - loss_mean) * 0.05, step + 1
        if step % 25 == 0:
            print(f"{elapsed:6.0f} s, {step * BATCH * WINDOW:9} tokens: divergence {loss_mean:.3f}, same likeliest token {100 * agreed:.1f} %", flush=True)
    save_file({f"mtp.{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}, args.output, metadata={"format": "pt"})


main()
