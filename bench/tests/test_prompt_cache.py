"""What the suite of the prompt cache counts with: sizes, conversations, streamed answers. Standard library only."""

import os
import sys
import tempfile
import threading
import unittest
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

WORLD = tempfile.TemporaryDirectory()
# Read when the modules are imported, by whichever test comes first.
os.environ.setdefault("BENCH_DIR", WORLD.name)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import peers  # noqa: E402
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


@contextmanager
def runs(*_, **__):
    yield "http://nowhere"


class Rows(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        usage = {"usage": {"prompt_tokens": 1025, "prompt_tokens_details": {"cached_tokens": 1024}}}
        self.answer = streaming.Answer([30.0, 40.0, 50.0], usage)

    def patched(self, **more):
        @contextmanager
        def folder(*_):
            yield self.folder

        answers = lambda *_, **__: self.answer  # noqa: E731
        patches = {"folder": folder, "kept": runs, "ask": answers, "restored": answers, "warm": lambda *_: None, "drop": lambda *_: None, "until_written": lambda _: 0.0}
        return mock.patch.multiple(prompt_cache, **{**patches, **more})

    def test_a_restore_stands_beside_the_disk_and_memory_beside_its_limit(self):
        with self.patched(disk_seconds=lambda *_: 0.019):
            rows, cold = prompt_cache.restore_of("dense", 1024, 2)
        self.assertEqual((cold, [row.ours for row in rows], [row.peer for row in rows]), (30.0, [20.0, 20.0, 30.0, 20.0], [19.0, 19.0, 30.0, 5.0]))
        self.assertEqual([row.met for row in rows], [True, None, None, False])
        [(_, table)] = prompt_cache.sections(rows)
        self.assertIn("Qwen3-0.6B | 1024 | 30 | 30.0 | 1 |", table)

    def test_peers_that_die_cost_their_rows_alone(self):
        @contextmanager
        def dies(*_, **__):
            raise Died("exit code 1: no room")
            yield

        dead = self.folder / "python"
        dead.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
        dead.chmod(0o755)
        llama = mock.Mock(missing="")
        llama.attempt, llama.name = lambda what: what(Path("llama-bench")), lambda form: f"llama.cpp {form}"
        with self.patched(server=dies, served=lambda *_: "model", PYTHON=dead, LLAMA=llama, READ_AHEAD=0), mock.patch.object(peers, "say"):
            rows = prompt_cache.beside_peers("hybrid", 2, True, [])
        self.assertEqual({row.peer_died for row in rows}, {"exit code 1: no room", "exit code 3: no such model"})
        self.assertEqual([(row.ours, row.rounds, row.met) for row in rows], [(30.0, 2, None)] * 5)

    def test_saving_is_measured_beside_a_server_that_keeps_nothing(self):
        said = {"output_tokens_per_second": 10.0, "ttft_ms": {"mean": 4.0}}
        slower = {"output_tokens_per_second": 9.0, "ttft_ms": {"mean": 5.0}}
        kept = lambda shape, path, *_: mock.MagicMock(__enter__=lambda _: "on" if path else "off")  # noqa: E731
        with self.patched(kept=kept, own=lambda address, *_, **__: slower if address == "on" else said, until_written=lambda _: 1e6):
            rows = prompt_cache.saving("dense", 2, True, notes := [])
        self.assertEqual([(row.ours, row.peer, row.met) for row in rows], [(9.0, 10.0, False), (5.0, 4.0, False)])
        self.assertIn("1 MB were written", notes[0])

    def test_campaigns_that_fail_or_say_nothing_are_no_success(self):
        said = "running 1 test\n600 requests: 90 of 200 blocks hit, 100 of an ideal cache; at most 7 of 8 bytes; 1 written\n"
        for code, out, met in [(0, said, True), (101, said, False), (0, "running 0 tests\n", False)]:
            with mock.patch.object(prompt_cache, "DIR", self.folder), mock.patch.object(prompt_cache.subprocess, "run", return_value=CompletedProcess([], code, out, "")):
                rows = prompt_cache.campaigns("", 1, True, [])
            self.assertEqual({row.met for row in rows if row.goal == 0}, {met})
            self.assertEqual([row.ratio for row in rows if row.figure == "hits"], [0.9] * 4 if out == said else [])


if __name__ == "__main__":
    unittest.main()
