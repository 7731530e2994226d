"""Bars from left to right, as SVG for a light page and for a dark one. Standard library only.

A chart is narrow and its text large, so that a phone shows it without zooming; what a bar is and what it says stand above it, where nothing lies on top of them. Nothing is said by
colour alone, and the text is in the file as text, for those who search or listen."""

import math
from dataclasses import dataclass, field
from html import escape

# Text and lines of text need a contrast of 4.5 with what they lie on, other marks one of 3 (WCAG 2.2); blue and orange are told apart by the colour-blind.
THEMES = {
    "light": {"paper": "#ffffff", "ink": "#1a1a1c", "muted": "#595959", "grid": "#dcdcd8", "bar": "#1d5f8a", "other": "#c06a28"},
    "dark": {"paper": "#16171a", "ink": "#ececea", "muted": "#a8a8a8", "grid": "#34363b", "bar": "#6cacd9", "other": "#dfa264"},
}
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
WIDTH, MARGIN = 520, 16
TITLE, TEXT, SMALL = 17, 14, 12
LINE, THICK, GAP = 19, 13, 15
# Of the axis, between two of its numbers.
APART = 0.13


@dataclass
class Bar:
    # One line or several; what is too long is broken.
    label: str
    value: float
    # What the value is called; else the chart's way of saying it.
    text: str = ""
    # The lowest and the highest value of the rounds.
    low: float | None = None
    high: float | None = None
    goal: float | None = None
    # Whether the goal was missed.
    missed: bool = False
    # How far the rest of a whole goes, drawn in the second colour behind the value.
    whole: float | None = None
    # Bars of another kind than the first, drawn in the second colour.
    other: bool = False


@dataclass
class Ratios:
    """A logarithmic axis around 1, to whose right is better."""

    left: str = "slower"
    right: str = "faster"

    def axis(self, bars):
        seen = [x for bar in bars for x in (bar.value, bar.low, bar.high, bar.goal, 1.0) if x is not None and x > 0]
        low, high = min(seen), max(seen)
        steps = [m * 10**e for e in range(-6, 7) for m in (1, 2, 5)]
        start = max(s for s in steps if s <= low)
        end = min(s for s in steps if s >= high * 1.001)
        place = lambda x: math.log(min(max(x, start), end) / start) / math.log(end / start)  # noqa: E731
        # Those of the round numbers that have room beside each other: 1 first, then powers of ten, then the ends.
        tens = [10.0**e for e in range(-6, 7)]
        ticks = []
        for tick in [1.0, *tens, start, end, *steps]:
            if start <= tick <= end and all(abs(place(tick) - place(other)) >= APART for other in ticks):
                ticks.append(tick)
        return place, 1.0, [(t, f"{short(t)}×") for t in sorted(ticks)]

    def said(self, value):
        return f"{number(value)}×"

    def aim(self, value):
        return f"{value:.3g}×"


@dataclass
class Amounts:
    """A linear axis from zero."""

    unit: str = ""
    digits: int = 0
    end: float | None = None

    def axis(self, bars):
        most = self.end or max(x for bar in bars for x in (bar.value, bar.high, bar.goal, bar.whole) if x is not None)
        step = next(m * 10**e for e in range(-6, 12) for m in (1, 2, 5) if m * 10**e * 5 >= most)
        end = self.end or step * math.ceil(most / step - 1e-9)
        count = int(end / step + 1e-9)
        return (lambda x: min(max(x, 0.0), end) / end), 0.0, [(i * step, self.said(i * step, axis=True)) for i in range(count + 1)]

    def said(self, value, axis=False):
        return (short(value) if axis else f"{value:,.{self.digits}f}") + (f" {self.unit}" if self.unit else "")

    def aim(self, value):
        return self.said(value, axis=True)


@dataclass
class Chart:
    title: str
    bars: list
    scale: Ratios | Amounts = field(default_factory=Ratios)
    # A line or two about what is shown.
    under: str = ""
    # What bars of the first and of the second colour are.
    names: tuple = ()

    def write(self, path):
        """`PATH-light.svg` and `PATH-dark.svg`."""
        for theme in THEMES:
            path.with_name(f"{path.name}-{theme}.svg").write_text(draw(self, theme))

    def picture(self, name):
        """HTML that shows the light or the dark chart, as the reader's browser asks for it. `name` is their path without the ending."""
        return (
            f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{name}-dark.svg">\n'
            f'  <img src="{name}-light.svg" width="{WIDTH + 120}" alt="{escape(self.title)}">\n</picture>\n'
        )


def draw(chart, theme):
    """An SVG file's text."""
    title, bars, scale, under, names, colours = chart.title, chart.bars, chart.scale, chart.under, chart.names, THEMES[theme]
    place, zero, ticks = scale.axis(bars)
    inner = WIDTH - 2 * MARGIN
    at = lambda x: round(MARGIN + place(x) * inner, 1)  # noqa: E731
    out, y = [], MARGIN

    def text(x, y, said, size=TEXT, colour="ink", anchor="start", bold=False):
        weight = ' font-weight="600"' if bold else ""
        out.append(f'<text x="{x}" y="{y}" font-size="{size}" fill="{colours[colour]}" text-anchor="{anchor}"{weight}>{escape(said)}</text>')

    def line(x0, y0, x1, y1, colour, width=1.0):
        out.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{colours[colour]}" stroke-width="{width}"/>')

    # 1. what it is
    for part in wrapped(title, TITLE * 1.06, inner):
        y += TITLE
        text(MARGIN, y, part, TITLE, bold=True)
        y += 5
    for part in (part for given in under.splitlines() for part in wrapped(given, SMALL, inner)):
        y += SMALL + 3
        text(MARGIN, y, part, SMALL, "muted")
    y += 12

    # 2. where everything goes, before the grid that lies under it
    rows = []
    # Goals stand below each other, left of the widest value.
    values = max(width_of(bar.text or scale.said(bar.value), TEXT * 1.06) for bar in bars) + 10
    for bar in bars:
        said = bar.text or scale.said(bar.value)
        goal = "" if bar.goal is None else f"goal {scale.aim(bar.goal)} {'missed' if bar.missed else 'met'}"
        beside = values + width_of(goal, SMALL) if goal else width_of(said, TEXT * 1.06)
        labels = [part for given in bar.label.split("\n") for part in wrapped(given, TEXT, inner - beside - 10)]
        rows.append((bar, labels, said, goal, y))
        y += LINE * len(labels) + THICK + GAP
    bottom = y - GAP + 7
    for value, name in ticks:
        for _, labels, _, _, begins in rows:
            # The line goes through bars and gaps, not through words.
            line(at(value), begins + LINE * len(labels) - 1, at(value), begins + LINE * len(labels) + THICK + 3, "grid")
        anchor = "start" if at(value) < MARGIN + 8 else "end" if at(value) > WIDTH - MARGIN - 8 else "middle"
        text(at(value), bottom + SMALL, name, SMALL, "muted", anchor)

    # 3. the bars
    for bar, labels, said, goal, begins in rows:
        for i, label in enumerate(labels):
            text(MARGIN, begins + LINE * i + TEXT - 1, label)
        right = WIDTH - MARGIN
        text(right, begins + TEXT - 1, said, bold=True, anchor="end")
        if goal:
            text(round(right - values, 1), begins + TEXT - 1, goal, SMALL, "muted", "end")
        y0, middle = begins + LINE * len(labels) + 1, begins + LINE * len(labels) + 1 + THICK / 2
        first, last = sorted((at(zero), at(bar.value)))
        colour = "other" if bar.missed or bar.other else "bar"
        out.append(f'<rect x="{first}" y="{y0}" width="{max(round(last - first, 1), 1)}" height="{THICK}" fill="{colours[colour]}"/>')
        if bar.whole is not None and at(bar.whole) > last:
            out.append(f'<rect x="{last + 1}" y="{y0}" width="{max(round(at(bar.whole) - last - 1, 1), 1)}" height="{THICK}" fill="{colours["other"]}"/>')
        if bar.low is not None and bar.high is not None and at(bar.high) - at(bar.low) > 2:
            # In ink with an edge of paper: it lies on the bar and beside it.
            line(at(bar.low), middle, at(bar.high), middle, "paper", 4)
            line(at(bar.low), middle, at(bar.high), middle, "ink", 1.5)
        if bar.goal is not None:
            line(at(bar.goal), y0 - 4, at(bar.goal), y0 + THICK + 4, "paper", 5)
            line(at(bar.goal), y0 - 4, at(bar.goal), y0 + THICK + 4, "ink", 2)
        line(at(zero), y0 - 3, at(zero), y0 + THICK + 3, "muted", 1)
    y = bottom + SMALL + 4
    if isinstance(scale, Ratios):
        y += SMALL + 2
        begins = at(1.0) + 6
        if any(bar.value < 1 for bar in bars):
            ends = max(at(1.0) - 6, MARGIN + width_of(f"← {scale.left}", SMALL))
            text(round(ends, 1), y, f"← {scale.left}", SMALL, "muted", "end")
            begins = max(begins, ends + 12)
        text(round(begins, 1), y, f"{scale.right} →", SMALL, "muted")
        y += 4

    # 4. what the marks are
    marks = [(kind, name) for kind, name in zip(("bar", "other"), names)]
    if not names and any(bar.missed for bar in bars):
        marks = [("bar", "goal met, or none"), ("other", "goal missed")]
    if any(bar.goal is not None for bar in bars):
        marks.append(("goal", "goal"))
    if any(bar.low is not None and bar.high is not None and at(bar.high) - at(bar.low) > 2 for bar in bars):
        marks.append(("range", "range over the rounds"))
    x = MARGIN
    if marks:
        y += SMALL + 8
    for kind, name in marks:
        wide = 20 + width_of(name, SMALL) + 18
        if x > MARGIN and x + wide > WIDTH:
            x, y = MARGIN, y + SMALL + 6
        if kind == "goal":
            line(x + 6, y - 11, x + 6, y + 2, "ink", 2)
        elif kind == "range":
            line(x, y - 4, x + 14, y - 4, "ink", 1.5)
        else:
            out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="11" fill="{colours[kind]}"/>')
        text(round(x + 20, 1), y, name, SMALL, "muted")
        x = round(x + wide, 1)
    height = y + MARGIN

    described = "; ".join(f"{', '.join(bar.label.splitlines())}: {said}{', ' + goal if goal else ''}" for bar, _, said, goal, _ in rows)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="t d" font-family="{FONT}">'
    what = f'<title id="t">{escape(title)}</title>\n<desc id="d">{escape(described)}</desc>'
    return "\n".join([head, what, f'<rect width="{WIDTH}" height="{height}" fill="{colours["paper"]}"/>', *out, "</svg>"]) + "\n"


def number(x):
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def short(x):
    """Of an axis: no more digits than a round number has."""
    return f"{x:,.0f}" if abs(x) >= 10 else f"{x:.6f}".rstrip("0").rstrip(".")


def width_of(text, size):
    """At most how wide a line of text is. DejaVu Sans is the widest of the fonts above."""
    narrow, wide = "iljft.,:;'|!()[] ", "mwMW%@×≥≤—"
    return sum(size * (0.40 if c in narrow else 0.95 if c in wide else 0.72 if c.isupper() else 0.63) for c in text)


def wrapped(text, size, width):
    """Lines of whole words, each at most `width` wide where its words are."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width_of(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
