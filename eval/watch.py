"""Several models on one prompt, side by side in the terminal."""

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from . import formatting
from .replay import Track, race

MIN_WIDTH = 34  # columns of a panel; with less, panels go one below the other
MIN_HEIGHT = 4  # lines of a panel, its frame included
REFRESH_S = 0.05
FRAME_COLUMNS, FRAME_LINES = 4, 2


def watch(tracks: Sequence[Track], console: Console) -> None:
    """Runs all tracks to their ends and shows them; leaves the complete answers on the screen.

    Where the console is no terminal, only the answers are printed.

    Raises:
        KeyboardInterrupt: Ctrl-C; what was written so far is left on the screen.
        see `Generator.generate`.
    """
    try:
        if console.is_terminal:
            _live(tracks, console)
        else:
            for track in tracks:
                track.warm_up()
            race(tracks)
    except KeyboardInterrupt:
        if any(track.snapshot is not None for track in tracks):
            console.print(panels(tracks, console))
        raise KeyboardInterrupt("interrupted; the answers are not complete") from None
    console.print(panels(tracks, console))


def panels(
    tracks: Sequence[Track], console: Console, *, height: int | None = None
) -> RenderableType:
    """All tracks side by side, or one below the other where the console is too narrow for that.

    Args:
        tracks: to show.
        console: for its width.
        height: lines in all; the ends of answers that need more are shown. None for all lines.
    """
    width = console.width // len(tracks)
    if width >= MIN_WIDTH:
        grid = Table.grid(expand=True)
        for _ in tracks:
            grid.add_column(ratio=1)
        grid.add_row(*(_panel(track, console, width, height) for track in tracks))
        return grid
    share = None if height is None else max(MIN_HEIGHT, height // len(tracks))
    return Group(*(_panel(track, console, console.width, share) for track in tracks))


def _live(tracks: Sequence[Track], console: Console) -> None:
    with console.status("compiling"):
        for track in tracks:
            track.warm_up()
    shown = 0.0
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show() -> None:
            nonlocal shown
            now = time.perf_counter()
            if now - shown >= REFRESH_S:
                shown = now
                live.update(panels(tracks, console, height=console.height - 1), refresh=True)

        race(tracks, show)


def _panel(track: Track, console: Console, width: int, height: int | None) -> Panel:
    # Text takes no markup, and printable() leaves no control character: an answer is only shown.
    body = Text(formatting.printable(track.prompt), style="dim")
    for text, known in () if track.snapshot is None else track.snapshot.segments:
        body.append(formatting.printable(text), style="not dim" if known else "bright_black")
    body.expand_tabs(8)
    if height is not None:
        lines = body.wrap(console, width - FRAME_COLUMNS)
        body = Text("\n").join(lines[-max(1, height - FRAME_LINES) :])
    return Panel(
        body,
        title=Text(formatting.printable(track.name)),
        subtitle=Text(_status(track, width - FRAME_COLUMNS)),
        border_style="green" if track.result is not None else "",
        height=height,
    )


def _status(track: Track, room: int) -> str:
    """How far a track is, in at most `room` characters: what matters least is left out first."""
    if track.snapshot is None:
        return "waiting"
    rate = track.tokens_per_s
    parts = [
        f"{track.snapshot.nfe} calls",
        f"{track.snapshot.tokens} tokens",
        *([] if rate is None else [f"{formatting.short(rate)} tok/s"]),
        f"step {track.steps}",
    ]
    while len(parts) > 1 and len(" · ".join(parts)) > room - 2:  # a blank on either side
        parts.pop()
    return " · ".join(parts)
