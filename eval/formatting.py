"""Figures as short text, the same way in the report, the plots and the terminal."""

MISSING = "\u2013"  # en dash


def fixed(value: float | None, digits: int) -> str:
    """Returns the value with so many decimals, or a dash."""
    return MISSING if value is None else f"{value:.{digits}f}"


def short(value: float | None, digits: int = 3) -> str:
    """Returns about `digits` significant figures, with k, M, G, T, P, E from 1000 up."""
    if value is None:
        return MISSING
    size = abs(value)
    for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if float(f"{size:.{digits}g}") >= factor:
            return significant(value / factor, digits) + unit
    return significant(value, digits)


def significant(value: float | None, digits: int = 3) -> str:
    """Returns `digits` significant figures without an exponent; integers keep all their digits."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    magnitude = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 1
    if abs(rounded) < 1:
        text = f"{rounded:.{digits + 3}f}".rstrip("0").rstrip(".")
        return text if text not in ("0", "-0") else f"{value:.1e}"
    text = f"{rounded:.{max(0, digits - magnitude)}f}"
    return text


def trimmed(value: float | None, digits: int = 3) -> str:
    """Returns `significant` without zeros after the decimal point: 32, 4, 0.25."""
    text = significant(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def byte_size(value: float | None) -> str:
    """Returns a size in B, KiB, MiB or GiB."""
    if value is None:
        return MISSING
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= factor:
            return f"{trimmed(value / factor)} {unit}"
    return f"{trimmed(value)} B"


def seconds(value: float | None) -> str:
    """Returns seconds, or minutes and seconds from two minutes up."""
    if value is None:
        return MISSING
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def interval(bounds: tuple[float, float] | None, digits: int = 3) -> str:
    """Returns `[low, high]`, or nothing when there is no interval."""
    return "" if bounds is None else f"[{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def signed(value: float, digits: int = 3) -> str:
    """Returns the value with its sign; a true minus, so that columns align."""
    return f"{value:+.{digits}f}".replace("-", "\u2212")


def listed(names: list[str]) -> str:
    """Returns "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def printable(text: str) -> str:
    """Returns the text with control characters made visible (tab and line feed stay)."""
    return "".join(
        c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else f"\\x{ord(c):02x}"
        for c in text
    )
