"""The script that stands between agents and the server in scripts/agents."""

import http.client
import json
import sys
import threading
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "agents"))

import fixtures  # noqa: E402
from script import FAREWELL, MARK, Script  # noqa: E402

PARTS = [b'data: {"a": 1}\n\n', b'data: {"b": "\xc3\xa9"}\n\n', b"data: [DONE]\n\n"]
STEPS = [(["cat", "read"], {"path": "x"}), (["edit"], {"path": "x", "new": "y"})]


class Upstream(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("sluice-ignored", "store")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in PARTS:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


class ScriptTest(unittest.TestCase):
    def setUp(self):
        self.upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
        self.upstream.bodies = []
        threading.Thread(target=self.upstream.serve_forever, daemon=True).start()
        self.script = Script(f"http://127.0.0.1:{self.upstream.server_address[1]}", STEPS)

    def tearDown(self):
        self.script.close()
        self.upstream.shutdown()
        self.upstream.server_close()

    def post(self, path, body):
        connection = http.client.HTTPConnection(*self.script.listener.server_address)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        self.assertEqual(answer.read(), b"".join(PARTS))
        self.assertEqual(answer.headers["sluice-ignored"], "store")
        connection.close()
        return self.upstream.bodies[-1]

    def test_a_step_narrows_one_tool_and_leaves_the_rest(self):
        said = [{"role": "user", "content": MARK}]
        body = {"model": "m", "messages": said, "tools": [tool("edit"), tool("read"), tool("other")], "stream": True}
        sent = self.post("/v1/chat/completions", body)
        self.assertEqual(sent["tool_choice"], {"type": "function", "function": {"name": "read"}})
        self.assertEqual([t["function"]["name"] for t in sent["tools"]], ["other", "edit", "read"])
        self.assertEqual(sent["tools"][2]["function"]["parameters"]["properties"], {"path": {"const": "x"}})
        self.assertEqual(sent["tools"][:2], [tool("other"), tool("edit")])
        for added in ("tools", "tool_choice"):
            sent.pop(added), body.pop(added, None)
        self.assertEqual(sent, body)

    def test_the_conversation_says_which_step_it_is(self):
        call = {"type": "function_call", "name": "read", "call_id": "c", "arguments": "{}"}
        body = {"input": [{"role": "user", "content": MARK}, call], "tools": [{"type": "function", "name": "edit"}]}
        sent = self.post("/v1/responses", body)
        self.assertEqual(sent["tool_choice"], {"type": "function", "name": "edit"})
        self.assertEqual(sent["tools"][0]["parameters"]["required"], ["path", "new"])
        body["input"].append(call)
        sent = self.post("/v1/responses", body)
        self.assertEqual((sent["tool_choice"], sent["text"]["format"]["type"]), ("none", "regex"))
        self.assertEqual(sent["text"]["format"]["regex"].replace("\\", ""), FAREWELL)

    def test_what_is_beside_the_script_has_a_text(self):
        sent = self.post("/v1/messages?beta=true", {"messages": [{"role": "user", "content": "A title?"}]})
        self.assertEqual(sent["output_config"]["format"]["type"], "regex")
        self.assertNotIn("tool_choice", sent)
        self.assertEqual(self.script.exchanges[-1].step, "aside")
        self.assertEqual(self.script.problems, [])


class FixtureTest(unittest.TestCase):
    def test_long_texts_and_ids_are_cut_and_the_shape_stays(self):
        work = Path("/tmp/sluice-agent-1/work")
        tools = [tool("read"), *(tool(f"t{i}") for i in range(9)), {"type": "web_search"}]
        text = f"in {work}/notes.txt as 01a20462-8748-79a2-8c98-5f9cea0de2aa"
        body = {"messages": [{"role": "system", "content": "long " * 99}, {"role": "user", "content": text}], "tools": tools}

        class Exchange:
            step, path, headers, answer_headers = 0, "/v1/chat/completions?x=1", {"X-App": "cli", "Authorization": "secret"}, {"sluice-ignored": "store, user"}

        Exchange.body = json.dumps(body).encode()
        found = fixtures.fixture({"agent": "a", "version": "1"}, [Exchange], [{"name": "read", "arguments": {}}], work)
        self.assertEqual((found["path"], found["headers"], found["ignored"]), ("/v1/chat/completions", {"x-app": "cli"}, [["store", "user"]]))
        system, user = found["requests"][0]["messages"]
        self.assertTrue(system["content"].endswith(" [..]") and len(system["content"]) < 80)
        self.assertEqual(user["content"], "in /work/fox/notes.txt as 00000000-0000-4000-8000-000000000000")
        kept = [t.get("function", {}).get("name") for t in found["requests"][0]["tools"]]
        self.assertEqual(kept, ["read", "t0", "t1", None])
        self.assertEqual(json.loads(fixtures.written(found)), found)


if __name__ == "__main__":
    unittest.main()
