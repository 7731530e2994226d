"""The suite of GPUs, with what the tools print in place of a GPU. Standard library only."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

BENCH = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCH))

import llama_cuda  # noqa: E402
import peers  # noqa: E402
from scratch import Failed  # noqa: E402
from suites import gpu  # noqa: E402


def figures(*all):
    return {"median": sorted(all)[len(all) // 2], "all": list(all)}


LIMITS = {
    "device": {"read_bytes_per_second": figures(4e12), "up_bytes_per_second": figures(50e9), "int8_operations_per_second": figures(1e15), "launch_seconds": figures(3e-6)},
    "host": {"read_bytes_per_second": figures(100e9)},
}
DECODED = {"weight_bytes_per_token": 1e9, "cache_bytes_per_token": 5e8, "phases": {"mlp": {"weight_bytes": 3_400_000_000, "seconds": 1e-3}, "attention": {"weight_bytes": 0, "seconds": 1.0}}}
TESTS = [{"n_prompt": 0, "n_gen": 128, "n_depth": d, "samples_ts": ts} for d, ts in ((128, [400.0, 500.0]), (8192, [300.0, 300.0]))]


def measured(what, *args, ours=None, llama=None, **more):
    """What a case makes of these answers, by case, figure and peer."""
    llama = llama or (lambda *_: llama_cuda.by_test(json.dumps(TESTS)))
    with mock.patch.multiple(gpu, ours=lambda *_, **__: ours, quickly=lambda *_: Path("model"), limits=lambda: LIMITS, llama=llama):
        return {(r.case, r.figure, r.peer_name): r for r in what(*args, **more)}


class Cases(unittest.TestCase):
    def test_without_a_gpu_the_suite_is_skipped_and_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, BENCH / "run", "gpu"], env={"PATH": "/nowhere", "BENCH_DIR": folder}, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""))
        self.assertRegex(done.stderr, r"^bench: gpu is skipped: there is no NVIDIA GPU here[^\n]*\n$")

    def test_decode_stands_beside_the_peer_and_the_bandwidth(self):
        lines = [{**DECODED, "tokens_per_second": figures(1000.0, 1000.0)}, {**DECODED, "tokens_per_second": figures(900.0, 900.0)}]
        rows = measured(gpu.decode, "8B", "q4", "Q4_0", 2, 2.1, ours=lines, deep=True, of_limit=0.2, matrices=lambda _: 0.85)
        speed = rows["decode, 8B, 4 bit", "speed", "llama.cpp CUDA Q4_0"]
        self.assertEqual((speed.ours, speed.peer, speed.ratio, speed.met), (1000.0, 450.0, 2.25, True))
        self.assertEqual(rows["decode, 8B, 4 bit", "weights read", "read limit"].ratio, 0.25)
        self.assertEqual(rows["decode at 8,192, 8B, 4 bit", "weights, keys and values read", "read limit"].ours, 1350.0)
        self.assertEqual(rows["decode at 8,192, 8B, 4 bit", "speed kept", "own at 128"].ratio, 0.9)
        self.assertEqual([r.ratio for (case, *_), r in rows.items() if case.startswith("matrices")], [0.85])

    def test_a_peer_that_dies_costs_its_own_rows_alone(self):
        def dies(*_):
            raise peers.Died("out of memory")

        rows = measured(gpu.decode, "8B", "q4", "Q4_0", 2, 2.1, ours=[{**DECODED, "tokens_per_second": figures(1.0)}], llama=dies)
        [row] = [r for r in rows.values() if r.peer_died]
        self.assertEqual((row.peer_died, row.ours, row.ratio), ("out of memory", 1.0, None))

    def test_tiers_are_bound_by_the_device_or_by_link_and_memory_together(self):
        with mock.patch.object(gpu, "limits", lambda: LIMITS):
            line = {"experts": {"wanted_bytes_per_token": 1e9, "experts": 100, "device": {"slots": 50, "hit_rate": 0.75}}}
            for whole, allowed in ((900.0, 600.0), (400.0, 400.0)):
                with mock.patch.object(gpu, "whole", lambda _, whole=whole: whole):
                    [found, held], [bound] = gpu.tiers("case", line), gpu.allowed("case", line, [300.0], 1)
                self.assertEqual((found.ours, held.ours), (75.0, 50.0))
                # 250 MB a token at 150 GB/s, or what the device does with all of them.
                self.assertEqual((bound.peer, bound.ratio), (allowed, 300.0 / allowed))

    def test_bits_are_those_of_the_cpu_or_not(self):
        for others, equal in (("a", 1.0), ("b", 0.0)):
            with mock.patch.multiple(gpu, quickly=lambda *_: "model", ours=lambda *_, device, **__: [{"logits": "a" if device == "cpu" else others}]):
                [row] = gpu.bits("8B", "q4", ("int8",))
            self.assertEqual((row.ours, row.met), (equal, equal == 1.0))

    def test_bits_of_tiers_are_those_of_a_device_that_has_all(self):
        for half, equal in (("a", 1.0), ("b", 0.0)):
            def ours(*_, half=half, **__):
                return [{"logits": half if "4000" in _ else "a"}]

            with mock.patch.multiple(gpu, quickly=lambda *_: "model", least=lambda _: 0, expert_bytes=lambda _: 8000, ours=lambda *a: ours(*map(str, a))):
                none, half_row = gpu.bits_of_tiers()
            self.assertEqual((none.ours, half_row.ours), (1.0, equal))

    def test_a_case_that_fails_is_noted_and_tried_again(self):
        def fails(_):
            raise Failed("bench: out of\nmemory")

        class Parts:
            measure = staticmethod(lambda name, what, notes: what())

        with mock.patch.dict(gpu.MEASURED, {"limits": fails, "other": lambda _: ["row"]}, clear=True):
            rows, notes = gpu.run(["limits", "other"], False, 2, Parts)
        self.assertEqual((rows, notes[0]), (["row"], "not measured: limits: bench: out of memory"))

    def test_sequences_are_read_from_lines_among_others(self):
        self.assertEqual(llama_cuda.by_parallel('main: n = 1\n{"pl": 8, "speed_tg": 10.5}\n{"pl": 32, "speed_tg": 20.0}\n'), {8: 10.5, 32: 20.0})


class Models(unittest.TestCase):
    def test_all_experts_of_the_mixture_are_counted(self):
        # 48 layers of 128 experts with three matrices of 2,048 x 768, in 4.5 bits.
        self.assertEqual(gpu.expert_bytes("30b-a3b"), 48 * 128 * 3 * 2048 * 768 * 4.5 / 8)

    def test_a_refusal_says_how_much_memory_would_do(self):
        said = "--gpu-memory of 100.0 MB is too little: ...; the smallest that would do is --gpu-memory 873.7M, or fewer bits"
        self.assertEqual(gpu.smallest(said), 873_700_000 + gpu.LONGER)
        with self.assertRaises(Failed):
            gpu.smallest("no such device")

    def test_llama_cpp_of_a_named_folder_is_not_built(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", {"BENCH_LLAMA_CUDA": folder}):
            llama = peers.CudaLlamaCpp()
            llama.make()
            self.assertEqual(llama.missing, f"not in {folder}")
            for name in llama.targets:
                (Path(folder) / name).touch()
            again = peers.CudaLlamaCpp()
            again.make()
            self.assertEqual((again.missing, again.bench), ("", Path(folder) / "llama-bench"))


if __name__ == "__main__":
    unittest.main()
