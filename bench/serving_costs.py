#!/usr/bin/env python3
"""bench/serving_costs.py SLUICE MODEL [--rounds 5] [--threads 2]: what forms cost answers, and what HTTP costs a token. Standard library only.

Forms: eight chats at once, free and held to a form, in turn, round by round; tokens per second of each beside those that were free in its round. HTTP: eight streams at once; CPU time
of each of the server's threads, by the names that it gives them, per thousand tokens.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

AT_ONCE = 8

# No model ends these within the tokens that are asked for, but perhaps the last two; the page says so then.
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["fox", "crow"]}, "old": {"type": "boolean"}},
    "required": ["name", "count", "kind", "old"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 500}
TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 20000}}, "required": ["text"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "write", "parameters": TEXT}}
FORMS = {
    "free": {"ignore_eos": True},
    "a list of objects": {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}}},
    "a long string": {"response_format": {"type": "json_schema", "json_schema": {"name": "text", "schema": TEXT}}},
    "a call": {"tools": [TOOL], "tool_choice": "required"},
    "a regular expression": {"guided_regex": "([a-z]{1,12}[ ,.])+"},
    "a grammar": {"grammar": 'start: line+\nline: /[A-Z][a-z ,]{5,60}/ ".\\n"'},
}


class Server:
    def __init__(self, sluice, model, threads):
        self.log = tempfile.NamedTemporaryFile("w+")
        command = [sluice, "serve", model, "--port", "0", "--threads", str(threads), "--parallel", str(AT_ONCE), "--no-request-log", "--draft", "off"]
        self.child = subprocess.Popen(command, stderr=self.log, stdout=subprocess.DEVNULL)
        while ": ready" not in (said := Path(self.log.name).read_text()):
            if self.child.poll() is not None:
                raise SystemExit(said)
            time.sleep(0.05)
        self.port = int(said.split("listening on ")[1].split()[0].rsplit(":", 1)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.terminate()
        self.child.wait()

    def ask(self, body, streamed=False):
        """Tokens that were generated."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(data.decode())
        if streamed:
            data = data.rstrip().rsplit(b"\n\n", 2)[-2].removeprefix(b"data: ")
        return json.loads(data)["usage"]["completion_tokens"]

    def together(self, fields, tokens, streamed=False):
        """Tokens and seconds of requests at once."""
        counts = [0] * AT_ONCE

        def one(i):
            messages = [{"role": "user", "content": f"Tell me story number {i}."}]
            body = {"messages": messages, "max_tokens": tokens, "seed": i, **fields}
            if streamed:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            counts[i] = self.ask(body, streamed)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(AT_ONCE)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts), time.perf_counter() - begun

    def cpu(self):
        """{name of threads: seconds of CPU time}"""
        all_of = {}
        for task in Path(f"/proc/{self.child.pid}/task").iterdir():
            name = (task / "comm").read_text().strip()
            # Nanoseconds on a CPU come first.
            spent = int((task / "schedstat").read_text().split()[0]) / 1e9
            all_of[name] = all_of.get(name, 0) + spent
        return all_of


def spent(server, run):
    before = server.cpu()
    tokens, seconds = run()
    after = server.cpu()
    return tokens, seconds, {name: after[name] - before.get(name, 0) for name in after}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sluice")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=["forms", "http"])
    args = parser.parse_args()
    with Server(args.sluice, args.model, args.threads) as server:
        for fields in FORMS.values():
            server.together(fields, 8)
        if args.only != "http":
            rates = {name: [] for name in FORMS}
            masks = {name: [] for name in FORMS}
            for round_ in range(args.rounds):
                names = list(FORMS)
                names = names[round_ % len(names) :] + names[: round_ % len(names)]
                for name in names:
                    tokens, seconds, by = spent(server, lambda name=name: server.together(FORMS[name], args.tokens))
                    rates[name].append(tokens / seconds)
                    masks[name].append(1e6 * by.get("masks", 0) / tokens)
                    if tokens < 0.95 * AT_ONCE * args.tokens:
                        print(f"note: {name}: {tokens} tokens only")
            for name in FORMS:
                beside = [a / b for a, b in zip(rates[name], rates["free"])]
                print(
                    f"{name:22} {statistics.median(rates[name]):8.1f} tok/s, {statistics.median(beside):.3f} of free (each round: "
                    f"{', '.join(f'{x:.3f}' for x in beside)}), masks {statistics.median(masks[name]):.0f} us a token",
                    flush=True,
                )
        if args.only != "forms":
            for streamed in (True, False):
                for _ in range(args.rounds):
                    tokens, seconds, by = spent(server, lambda s=streamed: server.together(FORMS["free"], 8 * args.tokens, s))
                    parts = ", ".join(f"{name} {1e3 * time / (tokens / 1000):.2f}" for name, time in sorted(by.items(), key=lambda item: -item[1]) if time > 1e-4)
                    print(f"{'streamed' if streamed else 'whole'}: {tokens} tokens, {tokens / seconds:.0f} tok/s; CPU ms for 1,000 tokens: {parts}", flush=True)


main()
