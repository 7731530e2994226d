"""The conversation with tools of `sluice bench serve --workload conversation`, of which one request can be sent at a time: system, questions, two calls of a tool behind each, one request
that is made again and one that is edited. Standard library only."""

import random

# Words of each message, about.
SYSTEM, QUESTION, THOUGHT, CALL, RESULT, ANSWER = 400, 40, 40, 12, 80, 60
CALLS = 2
# Parts of the conversation after which something is asked for again, and asked differently.
REGENERATION, EDIT = 0.4, 0.7
# Tokens at the end of an earlier prompt that may be other ones once a text stands behind it.
JOIN = 8


def requests(seed, turns, stripped):
    """(kind, messages) of each request; `stripped`: thoughts before the last question are left out."""
    rng = random.Random(seed)

    def text(mean):
        words = ("".join(rng.choice(letters) for letters in ("bdfgklmnprstvz", "aeiou") * 2) for _ in range(rng.randint(mean // 4, mean * 7 // 4)))
        return " ".join(words) + "."

    history, made = [("system", text(SYSTEM), "")], []
    calls, edited = CALLS, False
    again, differently = int(REGENERATION * turns), int(EDIT * turns)
    while len(made) < turns:
        if len(made) > again and not any(kind == "regeneration" for kind, _ in made):
            kind = "regeneration"
        elif len(made) > differently and not edited:
            kind, edited, calls = "edit", True, 0
            del history[max(i for i, entry in enumerate(history) if entry[0] == "user") :]
            history.append(("user", text(QUESTION), ""))
        elif calls < CALLS:
            kind, calls = "tool result", calls + 1
            history += [("assistant", f"<tool_call>{text(CALL)}</tool_call>", text(THOUGHT)), ("tool", text(RESULT), "")]
        else:
            if made:
                history.append(("assistant", text(ANSWER), text(THOUGHT)))
            kind, calls = "question", 0
            history.append(("user", text(QUESTION), ""))
        made.append((kind, _messages(history, stripped)))
    return made


def _messages(history, stripped):
    last = max(i for i, entry in enumerate(history) if entry[0] == "user")
    thinks = lambda i, thought: thought and not (stripped and i < last)  # noqa: E731
    return [{"role": role, "content": f"<think>\n{thought}\n</think>\n\n{text}" if thinks(i, thought) else text} for i, (role, text, thought) in enumerate(history)]


def last_turn(before, messages, tokens):
    """Tokens that a prompt has more than the longest earlier one that it goes on from; `before`: (messages, tokens) of those."""
    goes_on = [n for old, n in before if len(old) < len(messages) and messages[: len(old)] == old]
    return tokens - max(goes_on, default=0)
