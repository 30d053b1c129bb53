"""Pictures of a profile as inline SVG: no script, no file besides, no network."""

from collections.abc import Sequence
from html import escape

from modular_kernel import stages
from modular_kernel.profiling.events import CallTimes, Span
from modular_kernel.profiling.report import RankProfile
from modular_kernel.profiling.words import name_of, number

_WIDTH, _LEFT, _RIGHT = 920, 250, 90
_ROW, _BAR = 24, 15
_COLOURS = {
    stages.QUANTISE_INPUT: "#b07aa1",
    stages.DISPATCH: "#f28e2b",
    stages.SORT: "#9c755f",
    stages.PERMUTE: "#edc948",
    stages.GEMM1: "#4e79a7",
    stages.QUANTISE: "#d37295",
    stages.GEMM2: "#59a14f",
    stages.UNPERMUTE: "#86bcb6",
    stages.REDUCE: "#76b7b2",
    stages.COMBINE: "#e15759",
}
_OTHER = "#a0a0a0"
_MAIN = (stages.GEMM1, stages.GEMM2, stages.DISPATCH, stages.COMBINE)


def colour(stage: str) -> str:
    """Of a stage; a fused one has that of its product or exchange, else of its first part."""
    names = stages.parts(stage)
    main = next((name for name in names if name in _MAIN), names[0])
    return _COLOURS.get(main, _OTHER)


def bars(rank: RankProfile) -> str:
    """Time of each stage, with a mark at its floor."""
    rows = [row for row in rank.rows if row.is_stage]
    most = max((max(row.us, row.floor.us if row.floor else 0.0) for row in rows), default=0.0)
    scale = _scale(most)
    shapes = []
    for index, row in enumerate(rows):
        y = index * _ROW + 4
        width = row.us * scale
        shapes.append(_label(name_of(row), y))
        shapes.append(
            _rect(_LEFT, y, width, colour(row.stage), f"{name_of(row)}: {number(row.us)} us")
        )
        at = _LEFT + width
        if row.floor is not None:
            mark = _LEFT + row.floor.us * scale
            title = f"floor {number(row.floor.us)} us, {row.floor.bound}"
            shapes.append(
                f'<line class="floor" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 2}" '
                f'y2="{y + _BAR + 2}"><title>{escape(title)}</title></line>'
            )
            at = max(at, mark)
        shapes.append(_text(at + 6, y, f"{number(row.us)} us"))
    return _figure(shapes, len(rows) * _ROW + 8, "Time of each stage; the dark line is its floor")


def against(first: RankProfile, second: RankProfile) -> str:
    """Stages of two pairings, bar under bar."""
    mine, theirs = (
        {row.stage: row for row in each.rows if row.is_stage} for each in (first, second)
    )
    names = list(dict.fromkeys((*mine, *theirs)))
    times = [row.us for rows in (mine, theirs) for row in rows.values()]
    scale, height = _scale(max(times, default=0.0)), 2 * _ROW - 6
    shapes = []
    for index, name in enumerate(names):
        top = index * height + 4
        shapes.append(_label(name.removeprefix(stages.PREFIX), top + _ROW // 2 - 3))
        for offset, (letter, rows) in enumerate((("A", mine), ("B", theirs))):
            if name not in rows:
                continue
            us, y = rows[name].us, top + offset * (_BAR + 3)
            faded = ' opacity="0.6"' if offset else ""
            shapes.append(
                _rect(_LEFT, y, us * scale, colour(name), f"{letter}: {number(us)} us", faded)
            )
            shapes.append(_text(_LEFT + us * scale + 6, y, f"{letter} {number(us)} us"))
    return _figure(shapes, len(names) * height + 8, "Stages of A and B")


def timeline(call: CallTimes) -> str:
    """Draw the call on the host and on the device, each from its own first moment."""
    lanes = [("host", [span for span in call.ranges if span.stage != stages.CALL])]
    if call.work:
        lanes.append(("device", list(call.work)))
    shapes: list[str] = []
    y = 4
    for name, spans in lanes:
        depth = _deepest(spans)
        y += _lane(shapes, name, spans, y, depth) + 10
    return _figure(shapes, y, "One call: ranges on the host, and work on the device")


def _lane(shapes: list[str], name: str, spans: Sequence[Span], y: int, depth: int) -> int:
    """One lane's shapes; its height."""
    start = min((span.start_us for span in spans), default=0.0)
    end = max((span.end_us for span in spans), default=0.0)
    scale = _scale(end - start)
    shapes.append(_label(f"{name}, {number(end - start)} us", y))
    for span, level in zip(spans, _levels(spans), strict=True):
        x, width = _LEFT + (span.start_us - start) * scale, (span.end_us - span.start_us) * scale
        title = f"{span.name}: {number(span.end_us - span.start_us)} us"
        if span.name != span.stage:
            title = f"{span.stage} - {title}"
        at = y + level * (_BAR + 3)
        shapes.append(_rect(x, at, max(width, 0.6), colour(span.stage), title))
    return depth * (_BAR + 3)


def _levels(spans: Sequence[Span]) -> list[int]:
    """How many spans before each in time are not over when it begins."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start_us, -spans[i].end_us))
    levels, active = [0] * len(spans), list[tuple[float, int]]()
    for index in order:
        active = [each for each in active if each[0] > spans[index].start_us]
        taken = {level for _, level in active}
        levels[index] = next(level for level in range(len(taken) + 1) if level not in taken)
        active.append((spans[index].end_us, levels[index]))
    return levels


def _deepest(spans: Sequence[Span]) -> int:
    return max(_levels(spans), default=0) + 1


def _scale(most: float) -> float:
    """Pixels of a microsecond."""
    return (_WIDTH - _LEFT - _RIGHT) / most if most > 0 else 0.0


def _rect(x: float, y: float, width: float, fill: str, title: str, more: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{fill}"{more}>'
        f"<title>{escape(title)}</title></rect>"
    )


def _text(x: float, y: int, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y + _BAR - 3}">{escape(text)}</text>'


def _label(text: str, y: int) -> str:
    return f'<text class="label" x="{_LEFT - 8}" y="{y + _BAR - 3}">{escape(text)}</text>'


def _figure(shapes: Sequence[str], height: int, title: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {height}" '
        f'role="img" aria-label="{escape(title)}">{"".join(shapes)}</svg></figure>'
    )
