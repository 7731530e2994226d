"""What a pair of random-weight models says whose agreement is planted. Behind each token comes one other, whatever was before: the tokens are walks that close only when all of
a walk's tokens have come. The larger model's head says so, since its row for a token is the embedding of the token before it. The smaller one says the same, but for a share of each walk's
tokens, behind which it says another: it is right as often as SHARES has it. So the first token of an answer chooses how well drafts go. Needs numpy, but for `start`."""

# How often the smaller model is right, by walk.
SHARES = (0.8, 0.4, 0.0)
# Of so many tokens in a row, the smaller model is wrong about the same number, at places that are drawn.
RUN = 5
# Bytes and the end of the vocabulary, where control tokens are, are in no walk.
FIRST, BEHIND = 256, 512


def start(share):
    """A token of the walk where the smaller model is right so often."""
    return FIRST - FIRST % len(SHARES) + len(SHARES) + SHARES.index(share)


def rows(vocabulary, drafter):
    """By token, the token that it comes behind."""
    import numpy as np

    random = np.random.Generator(np.random.SFC64(52))
    before = np.arange(vocabulary)
    for number, share in enumerate(SHARES):
        walk = np.arange(start(share), vocabulary - BEHIND, len(SHARES))
        walk = random.permutation(walk)
        # 1. The walk: a token comes behind the one at the place before its own
        before[walk] = np.roll(walk, 1)
        # 2. Of each run some tokens are followed by another one's follower
        wrong = np.concatenate([random.permutation(RUN)[: round(RUN * (1 - share))] + at for at in range(0, len(walk) - RUN, RUN)])
        if drafter and len(wrong):
            followers = np.roll(walk, -1)[wrong]
            before[np.roll(followers, 1)] = walk[wrong]
    return before
