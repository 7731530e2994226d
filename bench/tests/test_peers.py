"""Peers that die, builds, and what --only makes: `bench/run` as it ships, with stubs for cargo, cmake, Sluice, llama.cpp and the peers' Python. Standard library only."""

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

BENCH = Path(__file__).resolve().parent.parent
WORLD = tempfile.TemporaryDirectory()
# Read when the modules are imported.
os.environ["BENCH_DIR"] = WORLD.name
sys.path.insert(0, str(BENCH))

import cgroup  # noqa: E402
import peers  # noqa: E402
import servers  # noqa: E402
import streamed_experts  # noqa: E402
from suites import loading, serving  # noqa: E402

ILLEGAL = "kill -s ILL $$"
ANSWER = """echo '[{"avg_ts": 5.0}]'"""
SPEED = '{"tokens_per_second": {"median": 10.0}, "weight_bytes_per_token": 1e8, "read_bytes_per_second": {"median": 4e10}, "operations_per_second": {"median": 1e12}, '
SPEED += '"peak_operations_per_second": {"median": 2e12}, "arithmetic": "int8"}'


def script(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def llama_cpp(body):
    """A llama.cpp of which `llama-bench` does this: in a folder of its own, wherever other tests have had the modules look."""
    with mock.patch.object(peers, "DIR", Path(tempfile.mkdtemp(dir=WORLD.name))):
        llama = peers.LlamaCpp()
    script(llama.bench, body)
    return llama


class World:
    """Folders with stubs in them, each of which writes what it was told to `log`."""

    def __init__(self, folder):
        self.folder, self.log = Path(folder), Path(folder) / "log"
        self.log.touch()
        self.dir = self.folder / "bench"
        (self.dir / "src" / f"llama_cpp_python-{peers.LLAMA_CPP_PYTHON}" / "vendor" / "llama.cpp").mkdir(parents=True)
        (self.dir / "env").mkdir()
        (self.dir / "env" / "requirements.txt").write_text(peers.REQUIREMENTS.read_text())
        self.stub("bin/cargo", "exit 0")
        self.stub("target/release/sluice", f"""case "$*" in --version) echo sluice 0;; *roofline*) echo '{{"threads": 1}}';; *) echo '{SPEED}';; esac""")
        installed = json.dumps([{"name": name, "version": "1"} for name in ("mlx", "mlx-lm", "torch", "transformers")])
        made = """case "$*" in *make_model.py*) mkdir -p "$(dirname "$4")"; : > "$4";; *list*) echo '%s';; *) %s;; esac""" % (installed, ILLEGAL)
        self.stub("bench/env/bin/python", made)
        self.llama(ANSWER)
        self.cmake(ANSWER)
        # Nothing large is made: how full the disk is must not matter.
        (self.folder / "site").mkdir()
        (self.folder / "site" / "sitecustomize.py").write_text("import shutil\nshutil.disk_usage = lambda path: shutil._ntuple_diskusage(10**12, 0, 10**12)\n")

    def stub(self, name, body):
        return script(self.folder / name, f'echo "{name} $*" >> {self.log}\n{body}')

    def llama(self, body):
        """The native build of llama.cpp."""
        name = f"llama.cpp-{peers.LLAMA_CPP_PYTHON}"
        self.stub(f"bench/{name}/bin/llama-bench", body)
        (self.dir / name / "CMakeCache.txt").write_text("CMAKE_C_COMPILER:FILEPATH=/nowhere/cc\n")

    def cmake(self, built):
        """What cmake builds; None: nothing, with an error."""
        if built is None:
            self.stub("bin/cmake", "echo no compiler; exit 1")
            return
        body = f"""if [ "$1" = --build ]; then
  mkdir -p "$2/bin"; printf '#!/bin/sh\\n%s\\n' {built!r} > "$2/bin/llama-bench"; chmod +x "$2/bin/llama-bench"
else
  mkdir -p "$4"; echo CMAKE_C_COMPILER:FILEPATH=/nowhere/cc > "$4/CMakeCache.txt"
fi"""
        self.stub("bin/cmake", body.replace(repr(built), "'" + built.replace("'", "'\\''") + "'"))

    def said(self, program):
        return [line for line in self.log.read_text().splitlines() if line.startswith(program)]

    def run(self, *words):
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        env = {**os.environ, "BENCH_DIR": str(self.dir), "CARGO_TARGET_DIR": str(self.folder / "target"), "PATH": path, "PYTHONPATH": str(self.folder / "site")}
        return subprocess.run([sys.executable, "-B", BENCH / "run", *words], env=env, capture_output=True, text=True)


class WithWorld(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.world = World(folder.name)

    def rows(self, *words):
        done = self.world.run(*words, "--rounds", "2", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


class PeersThatDie(WithWorld):
    def test_a_death_costs_its_row_and_the_reason_is_said(self):
        self.world.llama("echo starting >&2; echo 'out|of luck' >&2; exit 3")
        rows, said = self.rows("kernels", "--only", "decode dense bf16")
        by_peer = {row["peer_name"]: row for row in rows}
        self.assertEqual(by_peer["llama.cpp BF16"]["peer_died"], "exit code 3: out of luck")
        self.assertIn("SIGILL", by_peer["transformers"]["peer_died"])
        self.assertEqual(by_peer["read limit"]["peer"], 40.0)
        self.assertTrue(all(row["ours"] for row in rows))
        self.assertIn("out of luck", said)
        # A peer that has died is not asked for a second round.
        self.assertEqual(len([x for x in self.world.said("bench/llama.cpp") if "--version" not in x]), 1)
        # The table says it too, where the peer's figure would stand.
        table = self.world.run("kernels", "--only", "decode dense bf16", "--rounds", "1").stdout
        self.assertIn("llama.cpp BF16 died: exit code 3: out of luck", table)

    def test_an_illegal_instruction_is_tried_again_without_amx(self):
        self.world.llama(ILLEGAL)
        rows, said = self.rows("kernels", "--only", "prefill hybrid q4")
        [row] = [row for row in rows if row["peer_name"].startswith("llama.cpp")]
        self.assertEqual((row["peer_name"], row["peer"], row["peer_died"]), ("llama.cpp Q4_0, built without AMX", 5.0, ""))
        configured, built = self.world.said("bin/cmake")
        self.assertIn("GGML_NATIVE=OFF", configured)
        self.assertIn("-march=native -mno-amx-tile -mno-amx-int8 -mno-amx-bf16", configured)
        self.assertIn("SIGILL", said)
        # It is remembered: the next run neither builds nor tries the other.
        tried = len(self.world.said(f"bench/llama.cpp-{peers.LLAMA_CPP_PYTHON}/"))
        rows, _ = self.rows("kernels", "--only", "prefill hybrid q4")
        self.assertEqual((len(self.world.said("bin/cmake")), len(self.world.said(f"bench/llama.cpp-{peers.LLAMA_CPP_PYTHON}/"))), (2, tried))
        self.assertIn("llama.cpp Q4_0, built without AMX", [row["peer_name"] for row in rows])

    def test_a_build_without_amx_that_dies_too_ends_there(self):
        self.world.llama(ILLEGAL)
        self.world.cmake(ILLEGAL)
        rows, _ = self.rows("kernels", "--only", "prefill hybrid q4")
        [row] = [row for row in rows if row["peer_name"].startswith("llama.cpp")]
        self.assertIn("SIGILL", row["peer_died"])
        self.assertEqual(len(self.world.said("bin/cmake")), 2)

    def test_a_peer_that_does_not_build_costs_its_rows(self):
        self.world.llama(ILLEGAL)
        self.world.cmake(None)
        rows, _ = self.rows("kernels", "--only", "prefill hybrid q4")
        [row] = [row for row in rows if row["peer_name"].startswith("llama.cpp")]
        self.assertIn("does not build", row["peer_died"])
        self.assertEqual(len(rows), 2)

    def test_an_answer_that_is_none_is_a_death(self):
        self.world.llama("echo hello")
        rows, _ = self.rows("kernels", "--only", "decode dense q8")
        self.assertEqual([row["peer_died"] for row in rows if row["peer_name"].startswith("llama.cpp")], ["its answer cannot be read"])

    def test_a_build_has_as_many_jobs_as_there_are_cores(self):
        (self.world.dir / f"llama.cpp-{peers.LLAMA_CPP_PYTHON}" / "bin" / "llama-bench").unlink()
        self.rows("kernels", "--only", "decode dense q8")
        configured, built = self.world.said("bin/cmake")
        self.assertIn("GGML_NATIVE=ON", configured)
        words = built.split()
        self.assertEqual(words[words.index("-j") + 1], str(len(os.sched_getaffinity(0))))


class Loading(unittest.TestCase):
    def test_first_tokens_of_peers_that_die_are_rows_that_say_so(self):
        folder = Path(tempfile.mkdtemp(dir=WORLD.name))
        sluice = script(folder / "sluice", "echo 1")
        dead = script(folder / "python", ILLEGAL)
        llama = llama_cpp("echo no such model >&2; exit 1")
        patches = {"SLUICE": sluice, "PYTHON": dead, "LLAMA": llama, "model": lambda shape, form: folder / form, "prepare": lambda *_: None}
        with mock.patch.multiple(loading, **patches), mock.patch.object(peers, "say"):
            rows = loading.starts("4b", "q4", "Q4_0", 2, False)
        self.assertEqual(len(rows), 2 * 8)
        for row in rows:
            wanted = "exit code 1: no such model" if row.peer_name.startswith("llama.cpp") else "SIGILL"
            self.assertIn(wanted, row.peer_died)
            self.assertEqual((row.rounds, row.peer, row.met), (2, None, None))


class Experts(unittest.TestCase):
    def test_llama_cpp_under_a_limit_dies_alone(self):
        llama = llama_cpp("exit 0")
        ran = cgroup.Ran(134, 0.1, "", "GGML_ASSERT failed\n")
        with mock.patch.multiple(streamed_experts, LLAMA=llama, evict=mock.DEFAULT), mock.patch.object(cgroup, "run", return_value=ran):
            with self.assertRaises(peers.Died) as caught:
                streamed_experts.llama("model.gguf", 1 << 30, 4)
            self.assertEqual(str(caught.exception), "exit code 134: GGML_ASSERT failed")
            ran.killed = True
            self.assertEqual(streamed_experts.llama("model.gguf", 1 << 30, 4), 0.0)


class Serving(unittest.TestCase):
    SAID = {
        "output_tokens_per_second": 20.0,
        "ttft_ms": {"mean": 3.0, "p99": 4.0},
        "tpot_ms": {"mean": 1.0, "p99": 2.0},
        "itl_ms": {"mean": 1.0, "p99": 2.0},
    }

    def test_a_server_that_dies_costs_its_own_figures(self):
        def dies(*_):
            raise peers.Died("exit code 1: no room")

        @contextmanager
        def runs(*_):
            yield "http://nowhere"

        patches = {"ours": runs, "theirs": dies, "ik": dies, "own": lambda *_: self.SAID, "IK_LLAMA": mock.Mock(missing="")}
        with mock.patch.multiple(serving, **patches), mock.patch.object(peers, "say"):
            rows = serving.throughput("dense", 2, False, [])
        self.assertEqual({row.peer_died for row in rows}, {"exit code 1: no room"})
        [speed] = [row for row in rows if row.figure == "output" and row.goal == 2.5]
        self.assertEqual((speed.ours, speed.rounds, speed.met), (20.0, serving.LONG_ROUNDS, None))

    def test_a_fork_that_has_died_once_is_not_tried_again(self):
        tried = []

        @contextmanager
        def runs(*_):
            tried.append("started")
            yield "http://nowhere"

        def silent(*_, patience):
            raise peers.Died(f"no answer within {patience} s")

        patches = {"ik": runs, "ask": silent, "IK_LLAMA": mock.Mock(missing="")}
        with mock.patch.multiple(serving, **patches), mock.patch.object(peers, "say"):
            died = [serving.beside_fork(shape, []).died for shape in ("dense", "moe", "hybrid")]
        self.assertEqual(died, [f"no answer within {serving.FIRST_ANSWER} s"] * 3)
        self.assertEqual(len(tried), 1)

    def test_a_server_that_does_not_hear_is_killed_with_all_that_it_has_started(self):
        folder = Path(tempfile.mkdtemp(dir=WORLD.name))
        deaf = script(folder / "server", f"trap '' TERM; sleep 600 & echo $$ $! > {folder}/some; mv {folder}/some {folder}/pids; while :; do sleep 1; done")
        with mock.patch.object(servers, "wait", lambda *_: [0 for _ in iter((folder / "pids").exists, True)]):
            with servers.server(lambda port: [deaf], "deaf", patience=0.1):
                pids = [int(pid) for pid in (folder / "pids").read_text().split()]
        # A child of nobody's may be a zombie for a moment.
        states = [Path(f"/proc/{pid}/stat") for pid in pids]
        until = time.monotonic() + 60
        alive = lambda path: path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"  # noqa: E731
        while any(alive(path) for path in states) and time.monotonic() < until:
            time.sleep(0.01)
        self.assertFalse(any(alive(path) for path in states))

    def test_a_client_that_takes_too_long_is_the_servers_death(self):
        folder = Path(tempfile.mkdtemp(dir=WORLD.name))
        with mock.patch.object(serving, "SLUICE", script(folder / "sluice", "exec sleep 600")):
            with self.assertRaises(peers.Died) as caught:
                serving.ask("http://nowhere", "dense", 1, patience=0.1)
        self.assertEqual(str(caught.exception), "no answer within 0.1 s")

    def test_figures_that_are_worse_than_the_peers_miss_their_goals(self):
        @contextmanager
        def runs(*_):
            yield "http://nowhere"

        worse = {**self.SAID, "output_tokens_per_second": 10.0, "ttft_ms": {"mean": 2.0, "p99": 2.0}}
        patches = {"ours": runs, "theirs": runs, "ik": runs, "own": lambda *_: self.SAID, "ask": lambda *_, **__: worse, "IK_LLAMA": mock.Mock(missing="")}
        with mock.patch.multiple(serving, **patches):
            rows = serving.throughput("dense", 1, False, [])
        met = {(row.figure, row.peer_name.split()[0]): row.met for row in rows if row.goal is not None}
        self.assertFalse(met["output", "llama-server"])
        self.assertFalse(met["TTFT, mean", "llama-server"])
        self.assertTrue(met["TPOT, P99", "llama-server"])
        self.assertTrue(met["output", "ik_llama.cpp"])


class Only(WithWorld):
    def models(self):
        return sorted(Path(line.split()[-1]).name for line in self.world.said("bench/env/bin/python") if "make_model.py" in line)

    def test_only_makes_the_models_that_it_needs(self):
        self.rows("kernels", "--only", "prefill hybrid q4")
        self.assertEqual(self.models(), ["hybrid-Q4_0.gguf", "hybrid-q4"])

    def test_only_limits_needs_no_model(self):
        self.rows("kernels", "--only", "limits")
        self.assertEqual(self.models(), [])

    def test_only_without_a_match_fails_before_anything_is_made(self):
        for suite, there in [("kernels", "prefill hybrid q4"), ("loading", "14b q6"), ("experts", "packing"), ("serving", "arrival dense"), ("prompt-cache", "campaigns")]:
            done = self.world.run(suite, "--only", "no such case")
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("no such case", done.stderr)
            self.assertIn(there, done.stderr)
        self.assertEqual(self.world.log.read_text(), "")


if __name__ == "__main__":
    unittest.main()
