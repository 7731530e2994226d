"""A client for servers that stream their answers: when each part comes, and what the server says of the prompt. Standard library only."""

import http.client
import json
import time
from dataclasses import dataclass, field
from statistics import median

from peers import Died


@dataclass
class Answer:
    """Times in milliseconds since the request was sent."""

    parts: list = field(default_factory=list)
    # What the server's events say, the later over the earlier.
    said: dict = field(default_factory=dict)

    @property
    def ttft(self):
        return self.parts[0]

    @property
    def step(self):
        """The usual time between parts."""
        return median(b - a for a, b in zip(self.parts, self.parts[1:]))

    @property
    def prompt(self):
        return self.said["usage"]["prompt_tokens"]

    @property
    def cached(self):
        return self.said["usage"]["prompt_tokens_details"]["cached_tokens"]


def post(address, path, body):
    """What a server answers, as JSON; its refusal is its death."""
    connection, answer = _send(address, path, json.dumps(body).encode())
    with connection:
        return json.loads(answer.read())


def stream(address, path, body):
    """The answer to a request that asks for a stream."""
    answer = Answer()
    # The time to write the request is the client's, not the server's.
    body = json.dumps({**body, "stream": True}).encode()
    begun = time.perf_counter()
    connection, events = _send(address, path, body)
    with connection:
        for line in events:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            now = 1e3 * (time.perf_counter() - begun)
            event = json.loads(data)
            if "error" in event:
                raise Died(str(event["error"])[:200])
            if _has_text(event):
                answer.parts.append(now)
            answer.said.update({key: value for key, value in event.items() if value})
    if not answer.parts:
        raise Died("an answer without a token")
    return answer


class _Connection(http.client.HTTPConnection):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _send(address, path, body):
    connection = _Connection(address.removeprefix("http://"), timeout=3600)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Died(f"{path}: {answer.status} {answer.read(200).decode(errors='replace')}")
    except (OSError, http.client.HTTPException) as error:
        raise Died(f"{path}: {error}") from None
    return connection, answer


def _has_text(event):
    """Of OpenAI's endpoints, or of llama.cpp's own."""
    choice = (event.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    return any([choice.get("text"), delta.get("content"), delta.get("reasoning_content"), event.get("content"), event.get("tokens")])
