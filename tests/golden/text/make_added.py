"""Writes added.json: small tokenizers whose special and added tokens stand in files beside tokenizer.json, and what transformers makes of them.

Run from the repository's root with the environment of tests/golden/requirements.txt.
"""

import json
import pathlib
import tempfile

from transformers import AutoTokenizer

HERE = pathlib.Path(__file__).parent


def added(content, special=False, **more):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": not special, "special": special} | more


WORDS = [chr(c) for c in range(ord("!"), ord("~") + 1)] + ["\u0120", "\u010a", "an", "the", "</s>", "<word>"]
BASE = {
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [{"id": 100, **added("<|im_end|>", True)}, {"id": 101, **added("<think>")}, {"id": 102, **added("<mask>", True, lstrip=True)}],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    "model": {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
        "byte_fallback": False, "vocab": {word: i for i, word in enumerate(WORDS)}, "merges": [["a", "n"]],
    },
}
NAMES = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token", "boi_token", "eoi_token"]
TEXTS = [
    "the cat <s> ran</s> an <PAD><|im_end|>", "<think> so </think> <THINK> the <Mask>  <mask> x <word>", "<image>a<boi> b <eoi><|extra_0|><|extra_1|>",
    " <new>  <New> a<new>b <lone> alone <tool> <|reserved|>",
]

# Names of cases, and the files of each beside tokenizer.json.
CASES = {
    "nothing else": {},
    "names in the configuration": {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}},
    "names in the map alone": {
        "tokenizer_config.json": {"model_max_length": 10},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": added("</s>", True, normalized=False), "unk_token": "<|im_end|>"},
    },
    "the map wins": {
        "tokenizer_config.json": {"bos_token": "<boi>", "eos_token": "</s>", "pad_token": "<PAD>"},
        "special_tokens_map.json": {"bos_token": "<s>", "pad_token": added("<PAD>", True, lstrip=True, rstrip=True)},
    },
    "the decoder makes the map be left out": {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"100": added("<|im_end|>", True)}},
        "special_tokens_map.json": {"bos_token": "<s>"}, "added_tokens.json": {"<new>": 103},
    },
    "the decoder has more": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "100": added("<|im_end|>", True), "101": added("<think>"), "102": added("<mask>", True, lstrip=True),
                "103": added("</think>"), "104": added("<tool>", True), "106": added("<new>", normalized=False, rstrip=True, lstrip=True),
                "105": added("<|reserved|>", True), "97": added("the"),
            },
        },
    },
    "the decoder says otherwise": {
        "tokenizer_config.json": {
            "bos_token": "<think>", "mask_token": "<mask>",
            "added_tokens_decoder": {"101": added("<think>", True, rstrip=True), "102": added("<mask>", normalized=True)},
        },
    },
    "the decoder has gaps": {"tokenizer_config.json": {"added_tokens_decoder": {"150": added("<tool>"), "120": added("<new>"), "9": added("<lone>", single_word=True)}}},
    "added tokens in a file": {
        "tokenizer_config.json": {"eos_token": "<tool>", "extra_special_tokens": ["<lone>"]},
        "added_tokens.json": {"<tool>": 104, "<new>": 103, "<lone>": 105, "<|im_end|>": 100, "<lost>": 101},
    },
    "more special tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<|extra_0|>", "<|im_end|>", "<|extra_1|>"]}},
    "extra special tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<|extra_1|>", "<|extra_0|>"], "additional_special_tokens": ["<lone>"]}},
    "extra special tokens, none of them": {"tokenizer_config.json": {"extra_special_tokens": [], "additional_special_tokens": ["<lone>"]}},
    "more special tokens in the map": {
        "tokenizer_config.json": {}, "special_tokens_map.json": {"additional_special_tokens": ["<lone>", "<|extra_0|>"], "cls_token": "<|extra_1|>"},
    },
    "extra ones in both": {
        "tokenizer_config.json": {"extra_special_tokens": ["<lone>", "<tool>"]},
        "special_tokens_map.json": {"extra_special_tokens": ["<tool>", {"content": "<new>", "lstrip": True}], "additional_special_tokens": ["<|extra_0|>"]},
    },
    "tokens with names of their own": {
        "tokenizer_config.json": {
            "eoi_token": "<eoi>", "image_token": {"__type": "AddedToken", **added("<image>", True)}, "add_bos_token": False, "bos_token": {"__type": "AddedToken", **added("<s>", lstrip=True)},
            "extra_special_tokens": {"boi_token": "<boi>"},
        },
    },
    "names of their own in the map": {
        "tokenizer_config.json": {"image_token": "<lone>"},
        "special_tokens_map.json": {"image_token": "<image>", "boi_token": added("<boi>", True), "extra_special_tokens": {"eoi_token": "<eoi>"}},
    },
    "one token with two names": {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "<s>", "pad_token": {"__type": "AddedToken", **added("<s>", True, lstrip=True)}}},
}


def main():
    cases = []
    for name, files in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "tokenizer.json").write_text(json.dumps(BASE))
            files = dict(files)
            # Which class reads it is no question of ours.
            files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast"} | files.get("tokenizer_config.json", {})
            for file, content in files.items():
                (folder / file).write_text(json.dumps(content))
            tokenizer = AutoTokenizer.from_pretrained(folder)
        vocab = tokenizer.get_vocab()
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
        template = "".join("{{ %s }}|" % token for token in NAMES)
        cases.append({
            "name": name, "files": files, "ids": ids, "added": {t: i for t, i in vocab.items() if i >= len(WORDS)},
            "skipping": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
            "names": tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False),
        })
    print(len(cases), "cases")
    golden = {"tokenizer": BASE, "texts": TEXTS, "template": template, "cases": cases}
    (HERE / "added.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")


main()
