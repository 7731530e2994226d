"""What is read of the profiler's files, and the rule by which kernels are bound. Standard library only."""

import sys
import tempfile
import unittest
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCH))

import kernel_profile as profile  # noqa: E402
from scratch import Failed  # noqa: E402

COLUMNS = ["Kernel Name", "Grid Size", "Block Size", profile.TIME, *profile.FIGURES.values(), *map(profile.STALL.format, profile.STALLS)]


def line(*cells):
    return ",".join(f'"{cell}"' for cell in cells) + "\n"


def launch(kernel, grid, time, memory="5.00", slots="20.00", **stalls):
    return line(kernel, grid, "(256, 1, 1)", time, memory, "10.00", slots, "12.50", "64", *(stalls.get(name, "") for name in profile.STALLS))


def file(folder, *rows, unit="ns"):
    path = Path(folder) / "small.csv"
    said = "==WARNING== Note: Running with unmodified GPU clocks.\n==PROF== Connected to process 1\n"
    units = line(*(unit if name == profile.TIME else "" for name in COLUMNS))
    path.write_text(said + line(*COLUMNS) + units + "".join(rows))
    return path


def of(**figures):
    return {"grid": [132, 1, 1], "memory": 10.0, "slots": 20.0, "stalls": [["long_scoreboard", 4.0], ["wait", 1.0]], **figures}


class Reading(unittest.TestCase):
    def test_launches_of_one_shape_are_one_row_with_medians(self):
        with tempfile.TemporaryDirectory() as folder:
            rows = [
                launch("encode", "(128, 1, 1)", "4,000", barrier="3.00", wait="1.50", long_scoreboard="1.00"),
                launch("one_4", "(132, 2, 1)", "1,137,184", memory="61.50"),
                launch("encode", "(128, 1, 1)", "5,000", barrier="1.00", wait="1.75", long_scoreboard="2.50"),
                launch("encode", "(128, 1, 1)", "9,000", barrier="2.00", wait="2.25", long_scoreboard="2.75"),
                launch("encode", "(64, 1, 1)", "1,000"),
            ]
            found = profile.launches(*profile.read(file(folder, *rows)))
        # The longest first.
        self.assertEqual([(one["kernel"], one["grid"], one["seen"], one["us"]) for one in found], [("one_4", [132, 2, 1], 1, 1137.18), ("encode", [128, 1, 1], 3, 5.0), ("encode", [64, 1, 1], 1, 1.0)])
        self.assertEqual((found[0]["memory"], found[0]["registers"], found[0]["block"]), (61.5, 64, [256, 1, 1]))
        # The two greatest of the medians.
        self.assertEqual(found[1]["stalls"], [["long_scoreboard", 2.5], ["barrier", 2.0]])

    def test_times_are_in_what_the_file_says(self):
        with tempfile.TemporaryDirectory() as folder:
            [one] = profile.launches(*profile.read(file(folder, launch("encode", "(1, 1, 1)", "1.50"), unit="ms")))
        self.assertEqual(one["us"], 1500.0)

    def test_a_file_without_kernels_is_refused_and_either_name_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            path = file(folder)
            self.assertRaises(Failed, profile.read, path)
            self.assertEqual(profile.made(Path(folder), "small"), path)
            path.rename(path.with_name("ncu-small.csv"))
            self.assertEqual(profile.made(Path(folder), "small").name, "ncu-small.csv")
            self.assertRaises(Failed, profile.made, Path(folder), "deep")


class Rule(unittest.TestCase):
    def test_memory_comes_first_then_instructions_then_blocks_then_latency(self):
        for bound, figures in (
            ("memory", {"memory": 60.0, "slots": 90.0, "grid": [1, 1, 1]}),
            ("instructions", {"memory": 59.9, "slots": 60.0, "grid": [1, 1, 1]}),
            ("too few blocks", {"slots": 59.9, "grid": [131, 1, 1]}),
            ("too few blocks", {"grid": [4, 32, 1]}),
            ("latency: memory", {"grid": [4, 33, 1]}),
            ("latency: barriers", {"stalls": [["not_selected", 3.0], ["barrier", 2.0]]}),
            ("latency: code", {"stalls": [["no_instruction", 3.0], ["not_selected", 2.0]]}),
        ):
            self.assertEqual(profile.bound(of(**figures), 132), bound)

    def test_each_reason_to_wait_has_words(self):
        self.assertEqual(len(set(profile.STALLS.values())), 14)
        self.assertEqual(len(profile.METRICS), 8 + 14)

    def test_kernels_of_the_prompt_are_told_from_a_tokens_own(self):
        cases = [{"command": "decode dense q4", "launches": [{"kernel": k} for k in ("tiles_few_4_2", "encode", "one_4")]}, {"command": "prefill dense q4", "launches": [{"kernel": "encode"}]}]
        self.assertEqual(profile.of_prompts(cases), {"encode", "tiles_few_4_2"})


if __name__ == "__main__":
    unittest.main()
