"""What rows say at a glance: bars for a chart, and ranges for a sentence. In both, a ratio says how many times as good ours is, so that times and sizes, of which less is better, are
turned around. Standard library only."""

from dataclasses import dataclass

from chart import Bar


@dataclass
class Pick:
    """A row that a chart shows: its case, figure and the beginning of its peer's name."""

    label: str
    case: str
    figure: str
    peer: str
    threads: int | None = None
    # For rows without a goal: less is better.
    less: bool = False
    # Its name in the README's chart; empty if it is not shown there.
    front: str = ""

    def of(self, rows):
        """The row, if it was measured and has a ratio."""
        fits = (r for r in rows if (r.case, r.figure) == (self.case, self.figure) and r.peer_name.startswith(self.peer) and self.threads in (None, r.threads))
        return next((r for r in fits if r.ratio), None)


def bars(rows, picks, front=False):
    """The bars of those picks that were measured; with `front` only those that stand in the README."""
    found = [(pick, pick.of(rows)) for pick in picks if pick.front or not front]
    return [bar(pick.front if front else pick.label, row, pick.less) for pick, row in found if row]


def bar(label, row, less=False):
    turned = less or not row.above
    value, low, high, goal = (x if x is None or not turned else 1 / x for x in (row.ratio, row.low, row.high, row.goal))
    if turned:
        low, high = high, low
    return Bar(label, value, low=low if row.rounds > 1 else None, high=high if row.rounds > 1 else None, goal=goal, missed=row.met is False)


def having(rows, case="", figure="", peer=""):
    """Those with a ratio whose case, figure and peer begin so."""
    return [r for r in rows if r.ratio and r.case.startswith(case) and r.figure.startswith(figure) and r.peer_name.startswith(peer)]


def joined(*findings):
    """Short findings that share a line: a page begins with at most twelve."""
    return list(filter(None, [" ".join(line for lines in findings for line in lines)]))


def spread(rows, less=False):
    """`1.16 to 2.05`: the lowest and highest ratio."""
    values = sorted(1 / r.ratio if less or not r.above else r.ratio for r in rows)
    low, high = (f"{v:.0f}" if v >= 10 else f"{v:.2g}" if v < 0.1 else f"{v:.2f}" for v in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"


def percent(rows):
    """`67 to 87 %`: the lowest and highest ratio of a share."""
    values = sorted(100 * r.ratio for r in rows)
    low, high = f"{values[0]:.0f}", f"{values[-1]:.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def goals(rows):
    """`3 of 6`: goals that were met."""
    aimed = [r for r in rows if r.met is not None]
    return f"{sum(r.met for r in aimed)} of {len(aimed)}"


def said(sentence, rows, **more):
    """A sentence about rows, in a list, and an empty one where there are none. It may use {spread}, {percent}, {goals}, {count} and {cases}."""
    if not rows:
        return []
    less = more.pop("less", False)
    count = len(rows)
    words = {"spread": spread(rows, less), "percent": percent(rows), "goals": goals(rows), "count": count, "cases": "one case" if count == 1 else f"{count} cases"}
    return [sentence.format(**words, **more)]
