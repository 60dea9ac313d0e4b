"""Several models on one prompt: each on a clock of its own, recorded, and shown as a web page.

The models take turns on one device: the next step always belongs to the one whose own clock, which
runs during its steps alone, is furthest behind. So what is seen at a moment is what each would have
written by then if it had the device to itself. Compiling is done before the clocks start.
"""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from pydantic import Field

from ..errors import ConfigError
from .formatting import printable
from .generate import Generation, Generator, Options, Snapshot
from .results import Record
from .results_io import atomic_write

MAX_FRAMES = 100  # of an entry; more would only make the file large
TEMPLATES = Path(__file__).parent / "templates"


class Frame(Record):
    """An answer at one moment.

    Attributes:
        time_s: on the entry's own clock.
        nfe: model calls made by then.
        tokens: known tokens of the answer.
        segments: (text, known) in order; see `Snapshot`.
    """

    time_s: float = Field(ge=0)
    nfe: int = Field(ge=0)
    tokens: int = Field(ge=0)
    segments: tuple[tuple[str, bool], ...]


class ReplayEntry(Record):
    """What one model did.

    Attributes:
        name: of the entry.
        decoding: how it was run, in a few words.
        frames: in order of time; the last holds the whole answer.
    """

    name: str
    decoding: str
    frames: tuple[Frame, ...] = Field(min_length=1)


class Replay(Record):
    """Several models on one prompt.

    Attributes:
        prompt: what all were given.
        entries: in the order to show them.
    """

    prompt: str
    entries: tuple[ReplayEntry, ...] = Field(min_length=1)


class Track:
    """One model on one prompt, step by step, on a clock of its own.

    Attributes:
        name: of the entry.
        decoding: how it is run, in a few words.
        prompt: what it was given.
        clock_s: seconds of its own steps so far.
        steps: steps taken.
        snapshot: the answer as it stands; None before the first step.
        result: the answer, once it is complete.
    """

    def __init__(self, name: str, generator: Generator, prompt: str, options: Options) -> None:
        """Takes an entry's generator and options; nothing is computed yet."""
        self.name, self.prompt = name, prompt
        self.decoding = describe_decoding(generator)
        self.clock_s, self.steps = 0.0, 0
        self.snapshot: Snapshot | None = None
        self.result: Generation | None = None
        self._canvas = generator.decoding.uses_steps
        self._begin = lambda: generator.snapshots(prompt, options)
        self._running = self._begin()
        self._frames: list[Frame] = []

    def warm_up(self) -> None:
        """Compiles what the first steps need; leaves clock and answer alone."""
        trial = self._begin()
        for _ in zip(range(2), trial):  # noqa: B905 (the answer may be shorter)
            pass
        trial.close()

    def step(self) -> bool:
        """Takes one step; False when the answer is complete.

        Raises:
            see `Generator.generate`.
        """
        begin = time.perf_counter()
        try:
            snapshot = next(self._running)
        except StopIteration as end:
            self._finish(end.value)
            return False
        self.clock_s += time.perf_counter() - begin
        self.steps += 1
        self.snapshot = self._without_future(snapshot)
        self._frames.append(self._frame(self.snapshot))
        return True

    @property
    def tokens_per_s(self) -> float | None:
        """Known tokens per second of its own clock; None before there is one."""
        if self.snapshot is None or not self.snapshot.tokens or not self.clock_s:
            return None
        return self.snapshot.tokens / self.clock_s

    def entry(self, *, max_frames: int = MAX_FRAMES) -> ReplayEntry:
        """What was seen, in at most `max_frames` evenly spaced frames; the two ends always."""
        frames = self._frames
        if len(frames) > max_frames:
            last = len(frames) - 1
            frames = [frames[round(i * last / (max_frames - 1))] for i in range(max_frames)]
        return ReplayEntry(name=self.name, decoding=self.decoding, frames=tuple(frames))

    def _finish(self, result: Generation) -> None:
        self.result = result
        self.snapshot = Snapshot(
            ((result.text, True),) if result.text else (),
            len(result.ids),
            result.nfe,
            result.token_evals,
        )
        # The answer as it is after stops were cut off, at the moment of the last step.
        self._frames[-1:] = [self._frame(self.snapshot)]

    def _without_future(self, snapshot: Snapshot) -> Snapshot:
        """What a decoding without a canvas has not come to yet is no part of the picture."""
        segments = snapshot.segments
        if not self._canvas and segments and not segments[-1][1]:
            segments = segments[:-1]
        return snapshot._replace(segments=segments)

    def _frame(self, snapshot: Snapshot) -> Frame:
        return Frame(
            time_s=round(self.clock_s, 6),
            nfe=snapshot.nfe,
            tokens=snapshot.tokens,
            segments=snapshot.segments,
        )


def describe_decoding(generator: Generator) -> str:
    """The decoding's name and its settings that are set."""
    decoding = generator.decoding
    options = [f"{key} {value}" for key, value in decoding.options().items() if value is not None]
    return ", ".join([decoding.name, *options])


def race(tracks: Sequence[Track], seen: Callable[[], None] = lambda: None) -> None:
    """Runs all tracks to their ends; `seen` is called after every step.

    Raises:
        see `Generator.generate`.
    """
    running = list(tracks)
    while running:
        track = min(running, key=lambda track: track.clock_s)
        if not track.step():
            running.remove(track)
        seen()


def record_replay(
    generators: Mapping[str, Generator],
    prompt: str,
    options: Options | Mapping[str, Options],
    *,
    max_frames: int = MAX_FRAMES,
) -> Replay:
    """Records several models on one prompt.

    Args:
        generators: by the entries' names, in the order to show them.
        prompt: for all.
        options: for all, or for each by name.
        max_frames: kept of each entry.

    Raises:
        ConfigError: no generator.
        see `Generator.generate`.
    """
    if not generators:
        raise ConfigError("replay: got no entry, want at least one")
    tracks = [
        Track(name, one, prompt, options if isinstance(options, Options) else options[name])
        for name, one in generators.items()
    ]
    for track in tracks:
        track.warm_up()
    race(tracks)
    return replay_of(tracks, max_frames=max_frames)


def replay_of(tracks: Sequence[Track], *, max_frames: int = MAX_FRAMES) -> Replay:
    """The record of tracks that took at least one step each."""
    entries = tuple(track.entry(max_frames=max_frames) for track in tracks)
    return Replay(prompt=tracks[0].prompt, entries=entries)


def replay_parts(replay: Replay) -> dict[str, Any]:
    """What the templates need: the record as JSON, the script, its hash for the page's policy."""
    script = (TEMPLATES / "replay.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return {
        "replay": replay,
        "replay_json": _script_json(replay),
        "replay_script": script,
        "replay_script_hash": f"sha256-{digest}",
    }


def replay_html(replay: Replay) -> str:
    """Returns the replay as one page, with play, pause and a slider, that needs no other file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    return environment.get_template("replay.html.j2").render(**replay_parts(replay))


def write_replay(replay: Replay, path: Path) -> None:
    """Writes the page whole or not at all.

    Raises:
        GenlabError: the folder cannot be written.
    """
    atomic_write(path, replay_html(replay))


def _script_json(replay: Replay) -> str:
    """JSON that can stand in a script element: ASCII, and nothing that HTML would read."""
    plain = {
        "prompt": printable(replay.prompt),
        "entries": [
            {
                "name": printable(entry.name),
                "frames": [
                    [
                        frame.time_s,
                        frame.nfe,
                        frame.tokens,
                        [[printable(text), int(known)] for text, known in frame.segments],
                    ]
                    for frame in entry.frames
                ],
            }
            for entry in replay.entries
        ],
    }
    text = json.dumps(plain, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
