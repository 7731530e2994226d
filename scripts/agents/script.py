"""A proxy between an agent and `sluice serve` that tells a small model what to call, so that a session takes the steps of a script.

The demo model cannot drive an agent. What a request asks for is therefore narrowed by fields that the server has for everybody: `tool_choice` names one tool, and of that tool
the schema allows one value for each argument; or the answer is to match an expression that allows one text. All else of a request, and every byte of an answer, goes through as it
came. Which step it is follows from the calls in the conversation that the agent sends.
"""

import http.client
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# What the last message of a session says, and what is said to questions beside it (a title for the session, say).
FAREWELL = "All three steps are done."
ASIDE = "Notes about a fox."
# In the user's words: requests that have it in them belong to the script.
MARK = "Follow the script of three steps."

HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "accept-encoding"}


def const(arguments):
    properties = {name: {"const": value} for name, value in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(arguments), "additionalProperties": False}


def form(text):
    return {"type": "regex", "regex": re.escape(text)}


class Dialect:
    """Where a dialect has what the script looks at. `calls`: how many there are in a conversation; `say`: adds that the answer is this text, where no form is asked for."""

    def __init__(self, name, schema, choice, calls, say):
        self.name, self.schema, self.choice, self.calls, self.say = name, schema, choice, calls, say

    def tools(self, body):
        """(name, tool) of each; those in a namespace are called NAMESPACE.NAME."""
        for tool in body.get("tools") or []:
            yield self.name(tool), tool
            for inner in tool.get("tools") or []:
                yield f"{self.name(tool)}.{self.name(inner)}", inner

    def names(self, body):
        return [name for name, _ in self.tools(body)]

    def narrow(self, body, name, arguments, last):
        """`last`: names of the tools that are narrowed in some step. They go behind the others: what comes before them stays as it is, and is found in the cache."""
        for found, tool in self.tools(body):
            if found == name:
                self.schema(tool, const(arguments))
        body["tools"].sort(key=lambda tool: (self.name(tool) in last, self.name(tool) == name))
        body["tool_choice"] = self.choice(name)


def responses_choice(name):
    namespace, _, name = name.rpartition(".")
    return {"type": "function", "name": name, **({"namespace": namespace} if namespace else {})}


def chat_say(body, text):
    if "response_format" not in body:
        body["response_format"] = form(text)
        if "tools" in body:
            body["tool_choice"] = "none"


def responses_say(body, text):
    if not (body.get("text") or {}).get("format"):
        body["text"] = {**(body.get("text") or {}), "format": form(text)}
        if "tools" in body:
            body["tool_choice"] = "none"


def messages_say(body, text):
    if not (body.get("output_config") or {}).get("format"):
        body["output_config"] = {**(body.get("output_config") or {}), "format": form(text)}
        if "tools" in body:
            body["tool_choice"] = {"type": "none"}


def blocks(body):
    return [block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]]


DIALECTS = {
    "/v1/chat/completions": Dialect(
        lambda tool: tool.get("function", {}).get("name"),
        lambda tool, schema: tool["function"].update(parameters=schema),
        lambda name: {"type": "function", "function": {"name": name}},
        lambda body: sum(len(message.get("tool_calls") or []) for message in body["messages"]),
        chat_say,
    ),
    "/v1/responses": Dialect(
        lambda tool: tool.get("name"),
        lambda tool, schema: tool.update(parameters=schema),
        responses_choice,
        lambda body: sum(item.get("type") in ("function_call", "custom_tool_call") for item in body["input"] if isinstance(item, dict)),
        responses_say,
    ),
    "/v1/messages": Dialect(
        lambda tool: tool.get("name"),
        lambda tool, schema: tool.update(input_schema=schema),
        lambda name: {"type": "tool", "name": name},
        lambda body: sum(block.get("type") == "tool_use" for block in blocks(body)),
        messages_say,
    ),
}


class Exchange:
    """One request as the agent sent it, what was added, and what came back."""

    def __init__(self, method, path, headers, body):
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self.begun = time.monotonic()
        self.step = self.status = None
        self.answer = b""
        self.answer_headers = {}
        self.sent = body

    def json(self):
        return json.loads(self.body) if self.body else None


class Script:
    """`steps`: [(the tool's names, any of which the agent may have, {its arguments})]."""

    def __init__(self, server, steps):
        self.server = urlsplit(server)
        self.steps = steps
        self.exchanges = []
        # The calls so far, step by step.
        self.taken = []
        self.problems = []
        handler = type("Handler", (Handler,), {"script": self})
        self.listener = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.listener.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.listener.server_address[1]}"
        threading.Thread(target=self.listener.serve_forever, daemon=True).start()

    def close(self):
        self.listener.shutdown()
        self.listener.server_close()

    def narrowed(self, exchange):
        """The body with what the script adds; the body itself where that is nothing."""
        dialect = DIALECTS.get(urlsplit(exchange.path).path)
        if dialect is None or exchange.method != "POST":
            return exchange.body
        body = exchange.json()
        if MARK.encode() not in exchange.body or not body.get("tools"):
            dialect.say(body, ASIDE)
            exchange.step = "aside"
            return json.dumps(body).encode()
        exchange.step = dialect.calls(body)
        tools = dialect.names(body)
        step = min(exchange.step, len(self.steps) - 1)
        names, arguments = self.steps[step]
        name = next((name for name in names if name in tools), None)
        if name is None:
            self.problems.append(f"none of {names} is among the agent's tools {tools}")
            return exchange.body
        dialect.narrow(body, name, arguments, {name for names, _ in self.steps for name in names})
        if exchange.step >= len(self.steps):
            dialect.say(body, FAREWELL)
        else:
            self.taken.append({"name": name, "arguments": arguments})
        return json.dumps(body).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script = None

    def log_message(self, *_):
        pass

    def handle_any(self):
        script = self.script
        if "chunked" in self.headers.get("transfer-encoding", ""):
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
        exchange = Exchange(self.command, self.path, dict(self.headers), body)
        script.exchanges.append(exchange)
        try:
            exchange.sent = script.narrowed(exchange)
        except Exception as error:  # noqa: BLE001
            script.problems.append(f"{self.path}: {error!r}")
        connection = http.client.HTTPConnection(script.server.hostname, script.server.port, timeout=900)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        connection.request(self.command, self.path, exchange.sent or None, {**headers, "Content-Length": str(len(exchange.sent))} if exchange.sent else headers)
        answer = connection.getresponse()
        exchange.status, exchange.answer_headers = answer.status, dict(answer.headers)
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in HOP:
                self.send_header(name, value)
        length = answer.headers.get("content-length")
        self.send_header(*(("content-length", length) if length else ("transfer-encoding", "chunked")))
        self.end_headers()
        try:
            while chunk := answer.read1(65536):
                exchange.answer += chunk
                self.wfile.write(chunk if length else b"%x\r\n%s\r\n" % (len(chunk), chunk))
                self.wfile.flush()
            if not length:
                self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            exchange.status = f"{exchange.status}, given up by the agent"
            self.close_connection = True
        finally:
            connection.close()
            exchange.seconds = time.monotonic() - exchange.begun

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = handle_any
