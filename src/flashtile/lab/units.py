"""Human-readable quantities: bytes, lengths, counts with a prefix, seconds."""


def size(n: float) -> str:
    """Format bytes: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            break
        n /= 1024
    return f"{n:.0f} {unit}" if unit == "B" else f"{_four(n)} {unit}"


def short(n: int) -> str:
    """Format a length: 8K for 8192, 1M for 1048576; unchanged below 4096."""
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if n >= 4096 and n % factor == 0:
            return f"{n // factor}{unit}"
    return f"{n}"


def quantity(n: float, unit: str) -> str:
    """Format with a prefix: 1.2 GFLOP, 3 kFLOP/s; 13.1 M without a unit."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(n) < 1000 or prefix == "P":
            break
        n /= 1000
    return f"{_four(n)} {prefix}{unit}".rstrip()


def seconds(t: float) -> str:
    """Format seconds: 2.5 ms, 12 s; from a hundred seconds on 20 min, 1.9 h."""
    if t >= 100:
        unit, t = ("min", t / 60) if t < 6000 else ("h", t / 3600)
        return f"{t:.1f} {unit}" if t < 10 else f"{t:,.0f} {unit}"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if t * scale >= 1 or unit == "us":
            break
    return f"{t * scale:.3g} {unit}"


def _four(n: float) -> str:
    """Format with four digits, or all digits if there is no larger unit."""
    return f"{n:.4g}" if abs(n) < 10_000 else f"{n:,.0f}"
