#!/usr/bin/env python3
"""What a cluster of replicas holds and asks for: bench/cluster_size.py [--replicas N] [--prefixes N] ... Numbers for docs/cluster.md. Standard library only.

Prefixes are asked for by a power law, and each goes to one replica, as the router sends it. A replica keeps what it used last, first in memory and then on its disk; all are in the store. Replicas
are alike and do not depend on each other, so that a few stand for all.
"""

import argparse
import bisect
import itertools
import random
from collections import OrderedDict

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--replicas", type=int, default=1000)
parser.add_argument("--prefixes", type=int, default=10_000_000)
parser.add_argument("--exponent", type=float, default=1.0, help="of the power law")
parser.add_argument("--tokens", type=int, default=2048, help="of a prefix")
parser.add_argument("--token-bytes", type=int, default=147_456, help="keys and values of a token (Qwen3-8B in bf16)")
parser.add_argument("--memory", type=float, default=60e9, help="bytes of a replica's memory for them")
parser.add_argument("--disk", type=float, default=2e12, help="bytes of its disk")
parser.add_argument("--requests", type=float, default=2.0, help="a second, of a replica")
parser.add_argument("--sample", type=int, default=5, help="replicas that are simulated")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

BLOCK = 32
each = args.tokens * args.token_bytes
room = {"memory": int(args.memory // each), "disk": int(args.disk // each)}
rng = random.Random(args.seed)
counts, asked = {"memory": 0, "disk": 0, "store": 0}, 0
for _ in range(args.sample):
    # The ranks of the prefixes that hashing gives to this replica.
    own = [rank for rank in range(rng.randrange(1, args.replicas + 1), args.prefixes + 1, args.replicas)]
    own = [min(args.prefixes, max(1, rank + rng.randrange(-args.replicas // 2, args.replicas // 2))) for rank in own]
    weights = list(itertools.accumulate(rank**-args.exponent for rank in own))
    tiers = {name: OrderedDict() for name in room}
    number = 20 * len(own)
    for step in range(number):
        prefix = bisect.bisect(weights, rng.random() * weights[-1])
        found = next((name for name, tier in tiers.items() if prefix in tier), "store")
        # What fills empty tiers at the start is left out.
        if step >= number // 2:
            counts[found] += 1
            asked += 1
        for name, tier in tiers.items():
            tier[prefix] = True
            tier.move_to_end(prefix)
            if len(tier) > room[name]:
                tier.popitem(last=False)

parts = {name: count / asked for name, count in counts.items()}
rate = args.replicas * args.requests
blocks = args.tokens // BLOCK
# The first probe, sixteen at a time until the end is found, then the blocks.
probes, rounds = 1, 0
left = blocks
while left > 1:
    probes, left, rounds = probes + min(16, left), left // 17, rounds + 1
print(f"a prefix                     {args.tokens} tokens, {each / 1e6:.0f} MB, {blocks} blocks of {args.token_bytes * BLOCK / 1e6:.1f} MB")
print(f"a replica has in memory      {room['memory']} prefixes, on disk {room['disk']}")
print("requests are answered from   " + ", ".join(f"{name} {100 * part:.0f}%" for name, part in parts.items()))
print(f"objects in the store         {args.prefixes * blocks / 1e6:.0f} million, {args.prefixes * each / 1e15:.1f} PB, if no two prefixes share a block")
print(f"names of objects             {args.prefixes * blocks * 92 / 1e9:.0f} GB, which the store keeps")
print(f"a replica's index            {room['disk'] * blocks / 1e3:.0f} thousand entries, {room['disk'] * blocks * 1024 / 1e6:.0f} MB on its disk at most")
print(f"a router                     {args.replicas} names of replicas, {args.replicas * 100 / 1e3:.0f} kB, and no prefix")
print(f"requests                     {rate:.0f} a second")
print(f"look-ups in the store        {rate * parts['store'] * probes:.0f} calls a second, in {1 + rounds} round trips each")
print(f"objects read                 {rate * parts['store'] * blocks:.0f} a second, {rate * parts['store'] * each / 1e9:.0f} GB/s of all replicas, {args.requests * parts['store'] * each / 1e6:.0f} MB/s of one")
print(f"without a store              {rate * parts['store'] * args.tokens / 1e3:.0f} thousand tokens a second would be computed instead")
