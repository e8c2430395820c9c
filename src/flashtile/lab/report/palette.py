"""The colours of the page, light and dark. The light ones are those of the figures (Okabe and Ito's)."""

from flashtile.lab.studies import canvas

LIGHT = {
    "ink": canvas.INK,
    "paper": "#ffffff",
    "muted": canvas.MUTED,
    "line": canvas.LINE,
    "panel": canvas.PANEL,
    "accent": canvas.BLUE,
    "warm": "#a84a00",  # these three are darker than in figures, so that text in them is readable
    "good": "#00745a",
    "bad": "#b3263a",
    "orange": canvas.ORANGE,
    "green": canvas.GREEN,
    "red": canvas.RED,
    "purple": canvas.PURPLE,
    "sky": canvas.SKY,
    **canvas.TILES,
}
DARK = {
    "ink": "#e7e9ec",
    "paper": "#15181c",
    "muted": "#a6aeb8",
    "line": "#3a4149",
    "panel": "#1d2126",
    "accent": "#6bb8ee",
    "warm": "#f0a660",
    "good": "#51c9a4",
    "bad": "#ff8d8d",
    "orange": "#e9ab2e",
    "green": "#35bd94",
    "red": "#f0803c",
    "purple": "#d994bd",
    "sky": "#64b4e4",
    "skipped": "#2c3239",
    "partial": "#b97f12",
    "full": "#2f7fb5",
}


def css() -> str:
    """The custom properties, by the system's colour scheme or the page's data-theme; print is always light."""
    light, dark = (_declarations(colours) for colours in (LIGHT, DARK))
    return "\n".join(
        (
            f":root {{ color-scheme: light dark; {light} }}",
            f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}",
            f":root[data-theme=light] {{ color-scheme: light; {light} }}",
            f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}",
            f"@media print {{ :root, :root[data-theme] {{ color-scheme: light; {light} }} }}",
        )
    )


def variables() -> dict[str, str]:
    """Each colour a figure may use -> the page's custom property for it. White stays white."""
    return {value.lower(): f"var(--{name})" for name, value in reversed(LIGHT.items()) if name != "paper"}


def _declarations(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
