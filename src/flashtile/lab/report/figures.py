"""Figures: a study's drawing as inline SVG that follows the page's colours, and as SVG and PNG files."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashtile.lab.report import palette
from flashtile.lab.studies import canvas

_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "flashtile"}  # text stays searchable text
_ID, _USE = re.compile(r'\bid="([^"]+)"'), re.compile(r'(href="#|url\(#)([^")]+)')
_HEX = re.compile(r"#[0-9a-fA-F]{6}\b")


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure in its forms."""

    inline: str
    svg: str
    png: bytes | None  # on request
    rem: float  # the largest width on the page, so that text has about the same size in all figures


def draw(name: str, make: Callable[[], canvas.Figure | None], png: bool = True) -> Drawing | None:
    """Render what make() draws, if anything; `name` prefixes every id, so that figures can share a page."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    # Figure.savefig draws everything twice, so the canvases are called directly.
    vectors, pixels = io.StringIO(), io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # none of it
    with matplotlib.rc_context(_SETTINGS):
        figure = make()
        if figure is None:
            return None
        FigureCanvasSVG(figure).print_svg(vectors, metadata=metadata)  # type: ignore[no-untyped-call]
        figure.set_layout_engine("none")  # the layout is done
        if png:
            FigureCanvasAgg(figure).print_png(pixels)  # type: ignore[no-untyped-call]
    svg, inches = vectors.getvalue(), float(figure.get_figwidth())
    return Drawing(inline(svg, name, inches), svg, pixels.getvalue() or None, 6 * inches)


def inline(svg: str, name: str, inches: float) -> str:
    """Turn an SVG file into an element of the page: no header, unique ids, the page's font and colours."""
    variables = palette.variables()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[^"]*"', "", svg, count=2)  # the page sets the size
    svg = _ID.sub(rf'id="{name}-\1"', svg)
    svg = _USE.sub(rf"\g<1>{name}-\g<2>", svg)
    svg = re.sub(r"font-family: [^;\"]+", "font-family: var(--sans)", svg)
    svg = _HEX.sub(lambda colour: variables.get(colour[0].lower(), colour[0]), svg)
    # Below this width text becomes too small to read: a narrow page scrolls the figure instead.
    return svg.replace("<svg ", f'<svg aria-hidden="true" style="min-width: {4.2 * inches:g}rem" ', 1)
