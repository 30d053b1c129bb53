"""Draw a call as a timeline of the host and of the device, and define the colors of stages."""

from collections.abc import Sequence

from modular_kernel.profiling.events import CallTimes, Span
from modular_kernel.profiling.summary import format_number
from modular_kernel.replay import stages
from modular_kernel.report.pages.document import Figure
from modular_kernel.report.pages.plots import (
    Scale,
    make_svg_element,
    make_svg_shape_with_tooltip,
    make_svg_text,
)

# In pixels: width and margins of the figure, distance between levels, and height of a bar.
_WIDTH, _LEFT, _RIGHT = 920, 140, 20
_LEVEL_HEIGHT, _BAR_HEIGHT = 18, 15
_COLORS = {
    stages.QUANTIZE_INPUT: "#b07aa1",
    stages.DISPATCH: "#f28e2b",
    stages.SORT: "#9c755f",
    stages.PERMUTE: "#edc948",
    stages.GEMM1: "#4e79a7",
    stages.QUANTIZE: "#d37295",
    stages.GEMM2: "#59a14f",
    stages.UNPERMUTE: "#86bcb6",
    stages.REDUCE: "#76b7b2",
    stages.COMBINE: "#e15759",
}
_OTHER_COLOR = "#a0a0a0"
_MAIN_STAGES = (stages.GEMM1, stages.GEMM2, stages.DISPATCH, stages.COMBINE)


def get_stage_color(stage: str) -> str:
    """Return the color of a stage.

    A fused stage has the color of its GEMM or exchange, or otherwise of its first stage.
    """
    names = stages.split_stages(stage)
    main = next((name for name in names if name in _MAIN_STAGES), names[0])
    return _COLORS.get(main, _OTHER_COLOR)


def draw_timeline(call: CallTimes) -> Figure:
    """Draw a lane with the ranges on the host, and a lane with the work on the device.

    Each lane begins with its first interval.
    """
    lanes = [("host", [span for span in call.ranges if span.stage != stages.CALL])]
    if call.work:
        lanes.append(("device", list(call.work)))
    shapes: list[str] = []
    y = 4
    for name, spans in lanes:
        y += _draw_lane(shapes, name, spans, y) + 10
    title = "One call: ranges on the host, and work on the device"
    return Figure("timeline", make_svg_element(shapes, _WIDTH, y, title), title)


def _draw_lane(shapes: list[str], name: str, spans: Sequence[Span], y: int) -> int:
    """Append the shapes of a lane whose top is at `y`, and return the height of the lane."""
    start = min((span.start_us for span in spans), default=0.0)
    end = max((span.end_us for span in spans), default=0.0)
    scale = Scale(0.0, max(end - start, 1e-9), 0.0, _WIDTH - _LEFT - _RIGHT, log=False)
    label = f"{name}, {format_number(end - start)} us"
    shapes.append(make_svg_text(_LEFT - 8, y + _BAR_HEIGHT - 3, label, ' text-anchor="end"'))
    levels = _assign_levels(spans)
    for span, level in zip(spans, levels, strict=True):
        us = span.end_us - span.start_us
        title = f"{span.name}: {format_number(us)} us"
        if span.name != span.stage:
            title = f"{span.stage} - {title}"
        attributes = (
            f'x="{_LEFT + scale.position(span.start_us - start):.1f}" '
            f'y="{y + level * _LEVEL_HEIGHT}" '
            f'width="{max(scale.position(us), 0.6):.1f}" height="{_BAR_HEIGHT}" '
            f'fill="{get_stage_color(span.stage)}"'
        )
        shapes.append(make_svg_shape_with_tooltip("rect", attributes, title))
    return (max(levels, default=0) + 1) * _LEVEL_HEIGHT


def _assign_levels(spans: Sequence[Span]) -> list[int]:
    """Return the level of each span: the lowest level that no overlapping span occupies."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start_us, -spans[i].end_us))
    levels, active = [0] * len(spans), list[tuple[float, int]]()
    for index in order:
        active = [interval for interval in active if interval[0] > spans[index].start_us]
        occupied = {level for _, level in active}
        levels[index] = next(level for level in range(len(occupied) + 1) if level not in occupied)
        active.append((spans[index].end_us, levels[index]))
    return levels
