"""What the suite of the prompt cache counts with: sizes, conversations, streamed answers. Standard library only."""

import sys
import threading
import unittest
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import streaming  # noqa: E402
import turns  # noqa: E402
from peers import Died  # noqa: E402
from suites import prompt_cache  # noqa: E402

EVENTS = [
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
    b'data: {"choices": [{"delta": {"content": "a"}}]}',
    b'data: {"choices": [{"delta": {"content": "b"}}]}',
    b'data: {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 39}}}',
    b"data: [DONE]",
]


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200 if self.path == "/stream" else 503)
        self.end_headers()
        self.wfile.write(b"\n\n".join(EVENTS) if self.path == "/stream" else b"no room")

    def log_message(self, *_):
        pass


class Streaming(unittest.TestCase):
    def test_parts_are_what_has_text_and_the_server_says_what_it_had(self):
        with HTTPServer(("127.0.0.1", 0), Answers) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}"
            answer = streaming.stream(address, "/stream", {})
            self.assertEqual((len(answer.parts), answer.prompt, answer.cached), (2, 40, 39))
            self.assertLessEqual(0, answer.step)
            with self.assertRaisesRegex(Died, "503 no room"):
                streaming.post(address, "/other", {})
            server.shutdown()


class Conversations(unittest.TestCase):
    def test_a_conversation_goes_on_but_where_it_is_asked_again(self):
        for stripped in (False, True):
            all_ = turns.requests(5, 30, stripped)
            kinds = [kind for kind, _ in all_]
            self.assertEqual((len(all_), kinds.count("regeneration"), kinds.count("edit")), (30, 1, 1))
            for (_, old), (kind, new) in zip(all_, all_[1:]):
                common = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
                if kind == "regeneration":
                    self.assertEqual(old, new)
                elif kind == "edit":
                    self.assertEqual((common + 1, new[common]["role"]), (len(new), "user"))
                elif not (stripped and kind == "question"):
                    self.assertEqual(common, len(old))
            thoughts = [m for m in all_[-1][1] if "<think>" in m["content"]]
            self.assertTrue(thoughts if not stripped else len(thoughts) <= turns.CALLS)

    def test_the_last_turn_is_what_no_earlier_prompt_had(self):
        before = [(["s", "a"], 100), (["s", "a", "b"], 130), (["s", "x"], 500)]
        self.assertEqual(turns.last_turn(before, ["s", "a", "b", "c"], 150), 20)
        self.assertEqual(turns.last_turn(before, ["s", "a", "b"], 130), 30)
        self.assertEqual(turns.last_turn([], ["s"], 130), 130)


class Sizes(unittest.TestCase):
    def test_bytes_are_those_of_keys_values_and_states(self):
        kept = {name: prompt_cache.kept_bytes(shape, 1024) for name, shape in prompt_cache.SHAPES.items()}
        # 28 layers of 8 heads, 6 of 4, one of 2 with a state of three others.
        self.assertEqual(kept["dense"], 1024 * 28 * 2 * 8 * 128 * 2)
        self.assertEqual(kept["moe"], 1024 * 6 * 2 * 4 * 128 * 2)
        self.assertEqual(kept["hybrid"], 1024 * 2 * 2 * 256 * 2 + 3 * 4 * (32 * 128 * 128 + 8192 * 3))

    def test_prompts_differ_by_their_seed_and_begin_alike_by_it(self):
        one, other = prompt_cache.prompt("dense", 1, 50), prompt_cache.prompt("dense", 2, 50)
        self.assertEqual(one[:20], prompt_cache.prompt("dense", 1, 20))
        self.assertNotEqual(one[:3], other[:3])


if __name__ == "__main__":
    unittest.main()
