"""What a server is asked: `measure(host, port)`. Short requests one after the other for their time, then questions about shared texts for what of them is found again. Standard library only."""

import http.client
import json
import statistics
import time

WARM, REQUESTS, TEXTS, QUESTIONS = 20, 200, 8, 6


def measure(host, port):
    """`ms`, the median time of a request, and of prompts: `cached` and all `tokens`."""
    connection = http.client.HTTPConnection(host, port, timeout=120)

    def ask(content, tokens):
        body = {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text[:500]
        return json.loads(text)["usage"]

    for _ in range(WARM):
        ask("Hi", 1)
    times = []
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        ask("Hi", 1)
        times.append(1e3 * (time.perf_counter() - begun))
    texts = [f"Story {k}: " + "Once upon a time there was a small dog who liked to run in the park. " * 8 for k in range(TEXTS)]
    usage = [ask(f"{text} Part {number}.", 2) for number in range(QUESTIONS) for text in texts]
    cached = sum((u.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for u in usage)
    return {"ms": statistics.median(times), "cached": cached, "tokens": sum(u["prompt_tokens"] for u in usage)}
