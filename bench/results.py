"""Results of a suite: rows, a table for people, JSON lines for machines, a page for the docs. Standard library only."""

import json
import statistics
from dataclasses import asdict, dataclass, field

from scratch import DIR, ROOT

RESULTS = ROOT / "docs" / "results"


@dataclass
class Row:
    """One comparison. `ratio` is ours over the peer's (or over the limit, where `peer` is one); `low` and `high` are its range over the rounds."""

    suite: str
    case: str
    figure: str
    unit: str
    ours: float
    # A peer's figure, or a limit measured in the same run, and which.
    peer: float | None = None
    peer_name: str = ""
    # Why there is no figure of a peer that should have one.
    peer_died: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    goal: float | None = None
    # Whether a ratio must be above the goal, or below it.
    above: bool = True
    met: bool | None = None
    rounds: int = 0
    threads: int = 0
    # All measurements, in order.
    ours_all: list = field(default_factory=list)
    peer_all: list = field(default_factory=list)


def compare(suite, case, figure, unit, ours, peer, peer_name, goal=None, above=True, threads=0, died=""):
    """A row from measurements that were made side by side: the k-th of `ours` beside the k-th of `peer`. Without a peer, a row that only reports; of a peer that has
    died, the reason."""
    row = Row(suite, case, figure, unit, statistics.median(ours), goal=goal, above=above, rounds=len(ours), threads=threads, ours_all=ours)
    if died:
        row.peer_name, row.peer_died = peer_name, died
    elif peer:
        ratios = [a / b for a, b in zip(ours, peer)]
        row.peer, row.peer_name, row.peer_all = statistics.median(peer), peer_name, peer
        row.ratio, row.low, row.high = statistics.median(ratios), min(ratios), max(ratios)
        if goal is not None:
            row.met = row.ratio >= goal if above else row.ratio <= goal
    return row


class Parts:
    """Parts of a suite, measured one after the other; kept until all are there, so that a run that was interrupted can go on."""

    def __init__(self, suite, commit, resume):
        self.path, self.commit = DIR / "unfinished" / f"{suite}.jsonl", commit
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if resume and self.path.exists() else []
        self.found = {part["name"]: part for part in map(json.loads, lines)}
        self.path.write_text("".join(line + "\n" for line in lines))

    def measure(self, name, what, notes):
        """The rows that `what()` gives, or has given before."""
        if name in self.found:
            part = self.found[name]
            notes.extend(n for n in part["notes"] if n not in notes)
            return [Row(**row) for row in part["rows"]]
        known = len(notes)
        rows = what()
        part = {"name": name, "commit": self.commit, "notes": notes[known:], "rows": [asdict(row) for row in rows]}
        self.found[name] = part
        with open(self.path, "a") as f:
            f.write(json.dumps(part) + "\n")
        return rows

    def finish(self, notes):
        """All parts are there, so the next run begins anew."""
        commits = sorted({part["commit"] for part in self.found.values()})
        if len(commits) > 1:
            notes.append(f"measured in several runs, at commits {', '.join(commits)}")
        self.path.unlink()


def number(x):
    if x is None:
        return "-"
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


HEAD = ["case", "figure", "threads", "ours", "peer", "ratio", "range", "goal", "met"]


def cells(row):
    sign = "≥" if row.above else "≤"
    return [
        row.case,
        f"{row.figure}, {row.unit}",
        str(row.threads) if row.threads else "-",
        number(row.ours),
        f"{number(row.peer)} ({row.peer_name})" if row.peer is not None else f"{row.peer_name} died: {row.peer_died}" if row.peer_died else "-",
        number(row.ratio),
        f"{number(row.low)}–{number(row.high)}" if row.ratio is not None else "-",
        f"{sign} {number(row.goal)}" if row.goal is not None else "-",
        {None: "-", True: "yes", False: "no"}[row.met],
    ]


def table(rows):
    """Columns for a terminal."""
    lines = [HEAD, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)


def lines(head, body):
    """A table in Markdown."""
    bar = lambda line: "| " + " | ".join(line) + " |\n"  # noqa: E731
    return bar(head) + bar(["---"] * len(head)) + "".join(map(bar, body))


def save(suite, machine, versions, notes, rows):
    """`docs/results/SUITE.jsonl`: what a page is written from."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / f"{suite}.jsonl", "w") as f:
        f.write(json.dumps({"suite": suite, "machine": machine, "versions": versions, "notes": notes}) + "\n")
        f.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def load(suite):
    """What `save` has written: its first line, and the rows; None where there is nothing."""
    path = RESULTS / f"{suite}.jsonl"
    if not path.exists():
        return None
    head, *rows = map(json.loads, path.read_text().splitlines())
    return head, [Row(**row) for row in rows]


def write(module, head, rows):
    """A suite's page: its charts, what was found, what the suite adds (`sections`), where it was measured, and all figures."""
    suite, machine, notes = head["suite"], head["machine"], head["notes"]
    provisional = [note for note in notes if note.startswith("PROVISIONAL")]
    page = top(suite, module.TITLE, module.charts(rows), [*module.found(rows), *provisional])
    parts = ", parts of it at others (see the notes)" if any("commit" in note for note in notes if "llama" not in note.partition(":")[0]) else ""
    page += f"\nMeasured {machine['date'].partition(' ')[0]} at commit {machine['commit']}{parts}: {where(machine)}.\n"
    sections = module.sections(rows) if hasattr(module, "sections") else ()
    page += "".join(f"\n## {heading}\n\n{text}" for heading, text in sections)
    page += "\n## Made on\n\n" + lines(["", ""], [[name, str(value)] for name, value in {**machine, **head["versions"]}.items()])
    if notes:
        page += "\n## Notes\n\n" + "".join(f"- {n}\n" for n in notes)
    page += f"\n## All figures\n\nMeasured by `bench/run {suite}`. `bench/run {suite} --redraw` writes this page anew from `{suite}.jsonl`. A ratio is ours over the peer's, measured one after the other: the median over the\n"
    page += "rounds. The range is the lowest and highest of these ratios.\n\n"
    page += lines(HEAD, map(cells, rows))
    path = RESULTS / f"{suite}.md"
    path.write_text(page)
    return path


def top(name, title, charts, found):
    """How a page begins: its title, a chart, a line for each finding, and further charts. They are written beside it by name (the first has none), where they show something."""
    pictures = []
    for which, chart in charts.items():
        if chart.bars:
            path = RESULTS / (f"{name}-{which}" if which else name)
            chart.write(path)
            pictures.append(chart.picture(path.name))
    findings = "".join(f"- {line}\n" for line in found)
    return "\n".join([f"# {title}\n", *pictures[:1], findings, *pictures[1:]])


def where(machine):
    """The machine in a few words."""
    gpu = f"{machine['GPU']}; " if "GPU" in machine else ""
    return f"{gpu}{machine['processor'].rpartition(', ')[0]}, {machine['memory']}"
