"""Charts, and the pages that begin with them. Standard library only."""

import importlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

BENCH = Path(__file__).resolve().parent.parent
ROOT = BENCH.parent
sys.path.insert(0, str(BENCH))

import chart  # noqa: E402
import findings  # noqa: E402
import front  # noqa: E402
import handwritten  # noqa: E402
import results  # noqa: E402
from chart import Amounts, Bar, Chart, Ratios  # noqa: E402
from findings import Pick, bars, spread  # noqa: E402
from results import compare  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
BARS = [
    Bar("decode <4 bit>", 2.0, low=1.5, high=3.0, goal=1.5),
    Bar("a label that is so long that it does not stand in one line beside what it says", 0.5, goal=10.0, missed=True),
    Bar("streamed", 49.4),
]
EXAMPLES = [
    Chart("Beside & above", BARS, under="one line\nand another that is rather longer than what a chart has room for, so that it must be broken"),
    Chart("From zero", [Bar("a", 5.0, "5.0 tokens/s", whole=100.0), Bar("b", 80.0, goal=90.0, missed=True)], Amounts("%", end=100.0), names=("in memory", "from disk")),
    Chart("Small", [Bar("a", 0.27, goal=0.5), Bar("b", 37.5)], Amounts("%", 2)),
    Chart("Wide", [Bar("a", 0.0007), Bar("b", 230.0)], Ratios("later", "sooner")),
]


def drawn(shown, theme="light"):
    return ElementTree.fromstring(chart.draw(shown, theme))


def brightness(colour):
    """Relative, as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a, b):
    low, high = sorted((brightness(a), brightness(b)))
    return (high + 0.05) / (low + 0.05)


class Drawing(unittest.TestCase):
    def test_everything_lies_inside_of_the_image(self):
        for shown in EXAMPLES:
            root = drawn(shown)
            wide, high = (float(root.get(side)) for side in ("width", "height"))
            for text in root.iter(f"{SVG}text"):
                x, long = float(text.get("x")), chart.width_of(text.text, float(text.get("font-size")))
                first = {"start": x, "middle": x - long / 2, "end": x - long}[text.get("text-anchor")]
                self.assertTrue(0 <= first and first + long <= wide and 0 < float(text.get("y")) < high, (shown.title, text.text))
            for bar in root.iter(f"{SVG}rect"):
                x, y = float(bar.get("x", 0)), float(bar.get("y", 0))
                self.assertTrue(0 <= x <= x + float(bar.get("width")) <= wide and 0 <= y <= y + float(bar.get("height")) <= high)

    def test_no_text_lies_on_another_in_its_line(self):
        for shown in EXAMPLES:
            lines = {}
            for text in drawn(shown).iter(f"{SVG}text"):
                x, long = float(text.get("x")), chart.width_of(text.text, float(text.get("font-size")))
                first = {"start": x, "middle": x - long / 2, "end": x - long}[text.get("text-anchor")]
                lines.setdefault(text.get("y"), []).append((first, first + long, text.text))
            for line in lines.values():
                line.sort()
                for (_, end, one), (begin, _, other) in zip(line, line[1:]):
                    self.assertLessEqual(end, begin + 1, (shown.title, one, other))

    def test_right_of_one_is_better_and_a_goal_stands_where_it_is(self):
        place, zero, ticks = Ratios().axis(BARS)
        self.assertEqual(zero, 1.0)
        self.assertLess(place(0.5), place(1.0))
        self.assertLess(place(1.0), place(49.4))
        # Twice and half are as far from one.
        self.assertAlmostEqual(place(2.0) - place(1.0), place(1.0) - place(0.5))
        self.assertIn((1.0, "1×"), ticks)
        for shown in EXAMPLES:
            place, zero, ticks = shown.scale.axis(shown.bars)
            places = [place(value) for value, _ in ticks]
            self.assertTrue(all(0 <= p <= 1 for p in places) and places == sorted(places), (shown.title, ticks))
            self.assertTrue(all(0 <= place(bar.value) <= 1 for bar in shown.bars))

    def test_what_it_shows_is_also_said(self):
        root = drawn(EXAMPLES[0])
        said = root.find(f"{SVG}desc").text
        self.assertIn("decode <4 bit>: 2.00×, goal 1.5× met", said)
        self.assertIn("0.50×, goal 10× missed", said)
        self.assertEqual(root.find(f"{SVG}title").text, "Beside & above")
        texts = [text.text for text in root.iter(f"{SVG}text")]
        for part in ("2.00×", "goal 1.5× met", "goal 10× missed", "goal missed", "range over the rounds", "← slower", "faster →"):
            self.assertIn(part, texts)

    def test_both_themes_say_the_same_and_are_legible(self):
        for shown in EXAMPLES:
            light, dark = ([text.text for text in drawn(shown, theme).iter(f"{SVG}text")] for theme in ("light", "dark"))
            self.assertEqual(light, dark)
        for colours in chart.THEMES.values():
            for text in ("ink", "muted"):
                self.assertGreaterEqual(contrast(colours[text], colours["paper"]), 4.5)
            for mark in ("bar", "other"):
                self.assertGreaterEqual(contrast(colours[mark], colours["paper"]), 3.0)
                # A whisker crosses bars with an edge of paper around it.
                self.assertGreaterEqual(contrast(colours["ink"], colours["paper"]), 4.5)

    def test_nothing_is_fetched_from_elsewhere(self):
        text = chart.draw(EXAMPLES[0], "dark")
        self.assertNotRegex(text.replace("http://www.w3.org/2000/svg", ""), r"https?:|<script|<image|@import|url\(")


class Findings(unittest.TestCase):
    ROWS = [
        compare("s", "decode, a", "speed", "tokens/s", [20.0, 30.0], [10.0, 10.0], "llama.cpp Q4_0", 3.0),
        compare("s", "decode, b", "speed", "tokens/s", [15.0], [10.0], "llama.cpp Q4_0", 1.5),
        compare("s", "start", "first token", "s", [1.0, 2.0], [4.0, 4.0], "llama.cpp, mapped", 1 / 1.5, False),
        compare("s", "start", "first token", "s", [1.0], [], "torch", died="out of luck"),
    ]

    def test_times_are_turned_around_with_their_ranges_and_goals(self):
        [bar] = bars(self.ROWS, [Pick("first", "start", "first token", "llama.cpp")])
        self.assertAlmostEqual(bar.value, 1 / 0.375)
        self.assertAlmostEqual((bar.low, bar.high, bar.goal), (2.0, 4.0, 1.5))
        self.assertFalse(bar.missed)
        [bar] = bars(self.ROWS, [Pick("decode", "decode, a", "speed", "llama.cpp")])
        self.assertEqual((bar.value, bar.low, bar.high, bar.goal, bar.missed), (2.5, 2.0, 3.0, 3.0, True))

    def test_what_was_not_measured_is_left_out(self):
        picks = [Pick("gone", "nowhere", "speed", ""), Pick("died", "start", "first token", "torch"), Pick("b", "decode, b", "speed", "llama", front="B")]
        self.assertEqual([bar.label for bar in bars(self.ROWS, picks)], ["b"])
        self.assertEqual([bar.label for bar in bars(self.ROWS, picks, front=True)], ["B"])
        self.assertEqual(findings.said("{spread}", []), [])

    def test_sentences_count_what_they_speak_of(self):
        rows = findings.having(self.ROWS, "decode", "speed", "llama")
        self.assertEqual(findings.said("{spread} in {cases}, {goals}", rows), ["1.50 to 2.50 in 2 cases, 1 of 2"])
        self.assertEqual(spread(findings.having(self.ROWS, "start")), "2.67")
        self.assertEqual(findings.goals(self.ROWS), "2 of 3")


class Pages(unittest.TestCase):
    def test_pages_and_charts_are_what_is_redrawn_from_their_figures(self):
        """`bench/run all --redraw` would change nothing that is committed."""
        with tempfile.TemporaryDirectory() as folder:
            there = Path(folder)
            for path in results.RESULTS.glob("*"):
                if path.suffix in (".json", ".jsonl") or path.stem in ("seam", "fuzzing", "experiments", "agents", "serving-conformance", "gpu-profile"):
                    (there / path.name).write_text(path.read_text())
            with mock.patch.object(results, "RESULTS", there), mock.patch.object(handwritten, "RESULTS", there), mock.patch.object(front, "PICTURES", there):
                for suite, head, rows in front.measured():
                    results.write(suite, head, rows)
                for name in ("quality", "quality_real", "experts_quality", "experts_per_token", "kernel_profile"):
                    module = importlib.import_module(name)
                    if not (there / f"{module.NAME}.json").exists():
                        continue
                    with mock.patch.object(module, "RESULTS", there):
                        module.redraw()
                list(handwritten.redraw())
                front.write()
            redrawn = [path for path in there.iterdir() if path.suffix in (".md", ".svg")]
            self.assertGreater(len(redrawn), 25)
            for path in redrawn:
                committed = results.RESULTS / path.name
                committed = committed if committed.exists() else ROOT / "docs" / "pictures" / path.name
                self.assertTrue(committed.exists() and committed.read_text() == path.read_text(), f"{path.name}: run `bench/run all --redraw`")

    def test_each_page_of_results_begins_with_a_chart_and_stands_in_the_index(self):
        index = (results.RESULTS / "README.md").read_text()
        for page in results.RESULTS.glob("*.md"):
            if page.name == "README.md":
                continue
            beginning = page.read_text().split("\n\n")[1]
            self.assertRegex(beginning, "^<(picture|img)", page.name)
            self.assertIn(f"[{page.name}]({page.name})", index)

    def test_the_readme_fits_three_screens(self):
        lines = (ROOT / "README.md").read_text().splitlines()
        self.assertLessEqual(len(lines), 120)
        self.assertEqual([line for line in lines if len(line) > 120], [])

    def test_charts_that_others_draw_turn_dark_by_themselves(self):
        for path in (results.RESULTS / "routing").glob("*.svg"):
            self.assertIn("prefers-color-scheme: dark", path.read_text())

    def test_what_pages_link_to_is_there(self):
        for page in [ROOT / "README.md", ROOT / "docs" / "usage.md", *results.RESULTS.glob("*.md")]:
            text = page.read_text()
            links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
            for link in links:
                self.assertTrue("://" in link or (page.parent / link).exists(), f"{page.name}: {link}")

    def test_the_readmes_chart_has_a_bar_of_each_suite_that_has_results(self):
        for suite, head, rows in front.measured():
            # A provisional page may have been measured in part.
            if not any(note.startswith("PROVISIONAL") for note in head["notes"]):
                self.assertTrue(bars(rows, suite.picks(rows), front=True), suite.SUITE)
        self.assertIn("in memory", front.charts()["tiers"].bars[0].label)

    def test_a_suite_draws_whatever_its_run_has_measured(self):
        for name in front.SUITES:
            suite = importlib.import_module(f"suites.{name}")
            case = "Qwen3-4B, 4 bit, cold, from the start"
            # Loading picks among its rows; the others say beforehand what they draw.
            picks = suite.picks([compare("loading", case, "first token", "s", [1.0], [2.0], "llama.cpp, the best at full speed")])
            self.assertEqual(len({(pick.case, pick.figure, pick.peer, pick.threads) for pick in picks}), len(picks), name)
            rows = [compare(name, pick.case, pick.figure, "x", [2.0, 4.0], [1.0, 1.0], pick.peer, threads=pick.threads or 0) for pick in picks]
            for measured in (rows, rows[:1]):
                self.assertEqual(len(bars(measured, picks)), len(measured))
                self.assertTrue(suite.found(measured)[0])
                for shown in (shown for shown in suite.charts(measured).values() if shown.bars):
                    self.assertEqual(drawn(shown).find(f"{SVG}title").text, shown.title)

    def test_findings_of_each_suite_are_a_few_lines(self):
        for suite, _, rows in front.measured():
            self.assertTrue(4 <= len(suite.found(rows)) <= 12, suite.SUITE)


class Redrawing(unittest.TestCase):
    def test_measures_nothing_and_refuses_what_has_no_figures(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in front.SUITES:
                if not (results.RESULTS / f"{name.replace('_', '-')}.jsonl").exists():
                    done = subprocess.run([sys.executable, "-B", BENCH / "run", name.replace("_", "-"), "--redraw"], env={"BENCH_DIR": folder, "PATH": ""}, capture_output=True, text=True)
                    self.assertEqual(done.returncode, 1)
                    self.assertIn(f"{name.replace('_', '-')}.jsonl: not there, nothing to redraw from", done.stderr)
            done = subprocess.run([sys.executable, "-B", BENCH / "run", "all"], env={"BENCH_DIR": folder, "PATH": ""}, capture_output=True, text=True)
            self.assertIn("only with --redraw", done.stderr)


if __name__ == "__main__":
    unittest.main()
