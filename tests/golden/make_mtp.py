#!/usr/bin/env python3
"""Heads that predict one token more, for golden checkpoints that `make.py` has written, and what they put out.

    env/bin/python tests/golden/make_mtp.py [CASE...]

transformers does not run such heads. This file puts one together of transformers' own decoder layer and norms, as vLLM and the technical report of DeepSeek-V3 describe it:
an entry for each token, made of its embedding and of the final hidden state of the token before it (zeros before the first); both are normed, joined by a matrix, and taken through a
layer. The model's own output head gives logits of the token behind. Where several tokens are predicted, a further entry is made of the predicted token and of what the head has put out
(Qwen: behind its last norm; DeepSeek and GLM: before it).

Writes, for each case, `mtp/CASE.safetensors` with the head under its family's names, and in `mtp/cases.json` the tokens, the greedy chain of CHAIN tokens behind them, and a file with the
logits of all entries: one for each token, then one for each token of the chain but the last.
"""
import json
import sys

import torch
from safetensors.torch import save_file
from transformers.masking_utils import create_causal_mask

from make import HERE, fill, load_reference, spread

OUT = HERE / "mtp"
TOKENS, CHAIN = 40, 4
# The checkpoint, and whether names and norms are Qwen's.
CASES = {"qwen3_5": True, "qwen3_5_moe": True, "glm4_moe": False, "deepseek_v3": False}


def head_of(model, is_qwen, generator):
    """The modules of a head, with random weights, and the names of its tensors."""
    config, text = model.config, model.model
    at = max(i for i, layer in enumerate(text.layers) if hasattr(layer, "self_attn"))
    layer = type(text.layers[at])(config, at).float().eval()
    norm, hidden = type(text.norm), config.hidden_size
    parts = {name: norm(hidden, eps=config.rms_norm_eps) for name in ("enorm", "hnorm", "shared_head.norm")} | {"eh_proj": torch.nn.Linear(2 * hidden, hidden, bias=False)}
    family, tensors = config.model_type.removesuffix("_text"), {}
    of_qwen = {"eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "shared_head.norm": "mtp.norm"}
    behind = f"model.layers.{len(text.layers)}"
    for part, module in parts.items():
        tensors[f"{of_qwen[part] if is_qwen else f'{behind}.{part}'}.weight"] = module.weight
    for name, parameter in layer.named_parameters():
        tensors[f"{'mtp.layers.0' if is_qwen else behind}.{name}"] = parameter
    with torch.no_grad():
        for name, parameter in tensors.items():
            random = fill(name.replace("mtp.", "model.").replace(".fc.", ".eh_proj."), tuple(parameter.shape), family, generator)
            parameter.copy_(random.to(torch.bfloat16).float())
        for name, buffer in layer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
                tensors[f"{behind}.{name}"] = buffer
    return layer, parts, {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def entries(model, layer, parts, tokens, states, passes_normed):
    """The logits of all entries: `[tokens, vocabulary]`, and the states that a further one is made of."""
    embedded = model.model.embed_tokens(torch.tensor([tokens]))
    x = parts["eh_proj"](torch.cat([parts["enorm"](embedded), parts["hnorm"](states[None])], dim=-1))
    positions = torch.arange(len(tokens))[None]
    axes = positions[None].expand(3, 1, -1) if hasattr(model.model.rotary_emb, "mrope_section") else positions
    angles = model.model.rotary_emb(x, axes)
    mask = create_causal_mask(config=model.config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=positions)
    x = layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
    x = x[0] if isinstance(x, tuple) else x
    normed = parts["shared_head.norm"](x)
    return model.lm_head(normed)[0], (normed if passes_normed else x)[0]


@torch.no_grad()
def main():
    OUT.mkdir(exist_ok=True)
    listing = OUT / "cases.json"
    cases = {c["name"]: c for c in json.loads(listing.read_text())} if listing.exists() else {}
    for number, name in enumerate(sys.argv[1:] or CASES):
        is_qwen = CASES[name]
        model = load_reference(HERE / name)
        generator = torch.Generator().manual_seed(4000 + number)
        tokens = torch.randint(0, model.config.vocab_size, (TOKENS,), generator=generator).tolist()
        layer, parts, tensors = head_of(model, is_qwen, generator)
        final = model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        states, all_tokens, chain = torch.cat([torch.zeros_like(final[:1]), final[:-1]]), list(tokens), []
        # The state of the last token belongs to the first token of the chain, which the model would say.
        for depth in range(CHAIN):
            logits, passed = entries(model, layer, parts, all_tokens, states, is_qwen)
            chain.append(int(logits[-1].argmax()))
            if depth + 1 < CHAIN:
                all_tokens.append(chain[-1])
                states = torch.cat([states, passed[-1:]])
        save_file({k: v.to(torch.float32 if k.endswith("bias") else torch.bfloat16) for k, v in tensors.items()}, OUT / f"{name}.safetensors", metadata={"format": "pt"})
        logits.float().numpy().astype("<f4").tofile(OUT / f"{name}.f32")
        cases[name] = {"name": name, "tokens": tokens, "chain": chain, "vocab": logits.shape[1], "range": round(spread(logits), 4)}
        print(name, cases[name]["range"], chain, sum(t.numel() for t in tensors.values()))
    listing.write_text("[\n" + ",\n".join(json.dumps(cases[name]) for name in sorted(cases)) + "\n]\n")


main()
