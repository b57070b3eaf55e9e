"""Small curves as one picture that Markdown can hold: an SVG file in a data URI."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

Curve = Sequence[tuple[int, float]]  # step and value

WIDTH, HEIGHT = 320, 130  # of one curve, pixels
LEFT, TOP, BOTTOM = 44, 26, 18  # margins
COLUMNS = 2
MAX_POINTS = 120


def draw_curves(curves: Mapping[str, Curve]) -> str:
    """Return a data URI with one small chart per curve, side by side; the curves have at least one point each."""
    charts = [_chart(number, title, _thinned(points)) for number, (title, points) in enumerate(curves.items())]
    rows = -(-len(charts) // COLUMNS)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * WIDTH} {rows * HEIGHT}" '
        f'width="{COLUMNS * WIDTH}" height="{rows * HEIGHT}" font-family="sans-serif" font-size="11" fill="#57606a">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(charts)}</svg>'
    )
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def _chart(number: int, title: str, points: Curve) -> str:
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    first, last = min(steps), max(steps)
    across, up = (WIDTH - LEFT - 10) / ((last - first) or 1), (HEIGHT - TOP - BOTTOM) / ((high - low) or 1.0)
    base = HEIGHT - BOTTOM
    places = [(LEFT + (step - first) * across, base - (value - low) * up) for step, value in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    x, y = places[-1]
    return (
        f'<g transform="translate({number % COLUMNS * WIDTH} {number // COLUMNS * HEIGHT})">'
        f'<text x="{LEFT}" y="16" fill="#1b1f24" font-weight="bold">{escape(title)} {values[-1]:.4g}</text>'
        f'<text x="{LEFT - 5}" y="{TOP + 4}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{LEFT - 5}" y="{base + 3}" text-anchor="end">{low:.3g}</text>'
        f'<path d="M{LEFT} {TOP}V{base}H{WIDTH - 10}" fill="none" stroke="#d0d7de"/>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{first}</text>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 4}" text-anchor="end">step {last}</text>'
        f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="1.5"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#0969da"/></g>'
    )


def _thinned(points: Curve) -> Curve:
    """Return at most about `MAX_POINTS` points at even distances, the last one included."""
    stride = -(-len(points) // MAX_POINTS)
    return [points[at] for at in range((len(points) - 1) % stride, len(points), stride)]
