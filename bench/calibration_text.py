#!/usr/bin/env python3
"""A text to calibrate by: documents of a corpus, in a random order that is always the same, without those that share 60 characters with a held-out text.

    bench/calibration_text.py CORPUS HELDOUT OUT [--characters N] [--seed N]

CORPUS has one JSON object per line (`.xz` and `.gz` are unpacked): `messages` (a list of role and content), or `prompt` and `response`, or `text`. Dialogues become
ChatML, long documents are cut, and `<|endoftext|>` stands between two. Sharing is judged document by document, with white space as one space and without ChatML's marks.
`bench/experts_quality.py` asks `shares` once more about the text that it is given. Standard library only.
"""

import argparse
import gzip
import json
import lzma
import random
import re
from pathlib import Path

END = "<|endoftext|>"
SHARED = 60
# Characters of a document that are taken: of a dialogue, of other text.
DIALOGUE, PROSE = 4000, 2000


def runs(text):
    """Every run of 60 characters inside a document, of one or several: no marks, one space for any white space."""
    for document in text.split(END):
        document = re.sub(r"<\|im_(start|end)\|>(user|assistant|system)?", "", document)
        document = re.sub(r"\s+", " ", document).strip()
        yield from (document[i : i + SHARED] for i in range(len(document) - SHARED + 1))


def windows(heldout):
    """What a text must not share with a held-out one."""
    return set(runs(heldout))


def shares(text, held):
    """The first 60 characters that a text has in common with a held-out one's `windows`, or None."""
    return next((run for run in runs(text) if run in held), None)


def written(document):
    """A document of the corpus as a model reads it."""
    messages = document.get("messages")
    if not messages and "prompt" in document:
        messages = [{"role": "user", "content": document["prompt"]}, {"role": "assistant", "content": document["response"]}]
    if not messages:
        return document["text"][:PROSE]
    return "\n".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in messages)[:DIALOGUE]


def calibration_text(corpus, heldout, characters, seed):
    """(text, documents taken, documents left out)."""
    unpack = {".xz": lzma.open, ".gz": gzip.open}.get(corpus.suffix, open)
    with unpack(corpus, "rt", encoding="utf-8") as lines:
        documents = [json.loads(line) for line in lines]
    random.Random(seed).shuffle(documents)
    held = windows(heldout.read_text(encoding="utf-8"))
    taken, length, left_out = [], 0, 0
    for document in documents:
        text = written(document)
        if shares(text, held):
            left_out += 1
            continue
        taken.append(text)
        length += len(text)
        if length >= characters:
            break
    return END.join(taken), len(taken), left_out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--characters", type=int, default=2_400_000, help="about how many to take (default 2.4 million)")
    parser.add_argument("--seed", type=int, default=1, help="of the order (default 1)")
    args = parser.parse_args()
    text, taken, left_out = calibration_text(args.corpus, args.heldout, args.characters, args.seed)
    args.out.write_text(text, encoding="utf-8")
    print(f"{args.out}: {len(text):,} characters of {taken:,} documents; {left_out:,} left out that share {SHARED} characters with {args.heldout}")


if __name__ == "__main__":
    main()
