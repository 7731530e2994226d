"""The suite of drafts on a GPU, with what the tools print in place of a GPU. Standard library only."""

import sys
import unittest
from pathlib import Path
from unittest import mock

BENCH = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCH))

from suites import drafts, drafts_gpu  # noqa: E402


def line(*speeds):
    return {"tokens_per_second": {"median": sorted(speeds)[len(speeds) // 2], "all": list(speeds)}, "draft_tokens": 40, "accepted_tokens": 30, "rounds": len(speeds)}


class Cases(unittest.TestCase):
    def test_a_pair_stands_beside_none_and_beside_the_best_fixed_width(self):
        lines = {"off": line(100.0, 100.0), "2": line(110.0, 110.0), "4": line(150.0, 150.0), "6": line(140.0, 140.0), "8": line(90.0, 90.0), "auto": line(120.0, 120.0)}
        with mock.patch.multiple(drafts, drafted=lambda *_: lines), mock.patch.multiple(drafts_gpu, pair_of=lambda *_: Path("model")):
            rows = {(r.figure, r.peer_name): r for r in drafts_gpu.MEASURED["pair dense 0.8"](2, False)}
        governed = rows["speed", "without drafts"]
        self.assertEqual((governed.suite, governed.case, governed.ratio, governed.met), ("drafts-gpu", "Qwen3-8B and 0.6B, 80% right", 1.2, False))
        self.assertEqual(rows["speed, the best fixed width", "without drafts (4 drafted)"].ratio, 1.5)
        self.assertEqual(rows["speed, as many as pay", "the best of widths off, 2, 4, 6, 8 (4)"].ratio, 0.8)
        self.assertEqual(rows["accepted", ""].ours, 75.0)

    def test_an_answer_has_the_goal_and_the_drafter_of_this_suite(self):
        asked = []

        def answered(name, draft, *more):
            asked.append((name, draft, more[1:]))
            return {"tokens": [1], "text": "a", "stats": {"generation": {"tokens_per_second": 50.0}, "drafts": {}}}

        with mock.patch.multiple(drafts, answered=answered):
            speed = drafts_gpu.MEASURED["prose greedy mtp"](1, False)[0]
        self.assertEqual(asked, [("prose greedy mtp", how, ("--device", "cuda")) for how in ("off", "mtp")])
        self.assertEqual((speed.suite, speed.goal, speed.met), ("drafts-gpu", 0.98, True))


if __name__ == "__main__":
    unittest.main()
