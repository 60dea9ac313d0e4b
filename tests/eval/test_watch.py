"""Models side by side: clocks, frames, panels and the page."""

import hashlib
import html.parser
import io
import json
import re
import runpy
from base64 import b64encode
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError, GenlabError
from genlab.eval import replay as module
from genlab.eval.generate import UNKNOWN, Generator, Options
from genlab.eval.replay import (
    Frame,
    Replay,
    ReplayEntry,
    Track,
    race,
    record_replay,
    replay_html,
    write_replay,
)
from genlab.eval.watch import panels, watch
from genlab.paradigms.decoding.plain import Plain
from genlab.paradigms.decoding.unmasking import Unmasking
from genlab.train.data.tokenizer import BytesTokenizer
from rich.console import Console

SCRIPTED = Path(__file__).parents[1] / "paradigms" / "decoding" / "scripted.py"
ScriptedModel = runpy.run_path(str(SCRIPTED))["ScriptedModel"]
BYTES = BytesTokenizer()
HOSTILE = "\x1b[2J\x9b31m[red]x[/red]\r\x07</script><b>&"
GREEDY = Options(temperature=0.0, max_new=24)


def speaker(text, end=BYTES.eos_id, length=48):
    """A generator that says `text`, then `end`."""
    script, data = np.full((1, length), end, np.int32), list(text.encode())
    script[0, : len(data)] = data
    return Generator(ScriptedModel(jnp.asarray(script), BYTES.vocab_size, 128), Plain(), BYTES)


def console(width, terminal=False, height=24):
    """A console that writes into a string."""
    return Console(
        file=io.StringIO(), width=width, height=height, force_terminal=terminal, highlight=False,
        color_system=None, legacy_windows=False,
    )  # fmt: skip


def printed(tracks, width, **options):
    """What a console of that width shows of the panels."""
    screen = console(width)
    screen.print(panels(tracks, screen, **options))
    return screen.file.getvalue()


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when `clock.now` is changed."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def slowed(track, clock, seconds):
    """The track, each of whose steps takes so long on the clock."""
    running = track._running

    def steps():
        while True:
            clock.now += seconds
            try:
                snapshot = next(running)
            except StopIteration as end:
                return end.value
            yield snapshot

    track._running = steps()
    return track


def test_snapshots_tell_known_from_unknown():
    snapshots = list(speaker("hé").snapshots("", Options(max_new=4, temperature=0.0)))
    assert [s.segments for s in snapshots] == [
        (("h", True), (UNKNOWN * 3, False)),
        (("h\N{REPLACEMENT CHARACTER}", True), (UNKNOWN * 2, False)),
        (("hé", True), (UNKNOWN, False)),
        (("hé", True),),
    ]
    assert [(s.tokens, s.nfe, s.token_evals) for s in snapshots] == [
        (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)
    ]  # fmt: skip


def test_a_track_ends_with_the_generation():
    track = Track("one", speaker("hello. more"), "", Options(**vars(GREEDY) | {"stop": (".",)}))
    track.warm_up()
    assert track.snapshot is None and track.steps == 0 and track.clock_s == 0.0
    while track.step():
        assert track.result is None
    want = speaker("hello. more").generate([""], Options(**vars(GREEDY) | {"stop": (".",)}))[0]
    # `generate` looks for stops every few steps only, and counts the calls until it does.
    assert (track.result.nfe, want.nfe) == (6, 9)
    counted = {"nfe": want.nfe, "token_evals": want.token_evals}
    assert track.result._replace(**counted) == want and track.snapshot.text == "hello"
    frames = track.entry().frames
    assert len(frames) == track.steps == 6
    assert [f.segments for f in frames[:2]] == [(("h", True),), (("he", True),)]  # no future
    assert frames[-1].segments == (("hello", True),) and frames[-1].tokens == 6
    assert [f.nfe for f in frames] == [1, 2, 3, 4, 5, 6]
    times = [f.time_s for f in frames]
    assert times == sorted(times) and times[-1] > 0


def test_the_one_furthest_behind_takes_the_next_step(clock):
    fast = slowed(Track("fast", speaker("f" * 12, length=12), "", Options(max_new=12)), clock, 1.0)
    slow = slowed(Track("slow", speaker("s" * 12, length=12), "", Options(max_new=3)), clock, 3.0)
    seen = []
    race([slow, fast], lambda: seen.append((slow.steps, fast.steps, slow.clock_s, fast.clock_s)))
    for slow_steps, fast_steps, slow_s, fast_s in seen:
        assert slow_s == 3 * slow_steps and fast_s == fast_steps
        # Nobody who still writes is more than one step of the other behind.
        if slow_steps < 3 and fast_steps < 12:
            assert -1 <= slow_s - fast_s <= 3
    assert slow.result.text == "sss" and fast.result.text == "f" * 12
    assert fast.tokens_per_s == 1.0 and slow.tokens_per_s == 1 / 3


def test_frames_are_thinned_evenly(clock):
    track = slowed(Track("one", speaker("x" * 40, length=40), "", Options(max_new=40)), clock, 1.0)
    race([track])
    frames = track.entry(max_frames=5).frames
    assert [f.time_s for f in frames] == [1.0, 11.0, 21.0, 30.0, 40.0]
    assert frames[-1].segments == (("x" * 40, True),)
    assert len(track.entry(max_frames=40).frames) == len(track.entry().frames) == 40


def test_nothing_asked_for_is_an_empty_answer():
    replay = record_replay({"one": speaker("x")}, "p", Options(max_new=0))
    (frame,) = replay.entries[0].frames
    assert frame == Frame(time_s=0.0, nfe=0, tokens=0, segments=())


def test_record_of_several(tmp_path):
    generators = {"a": speaker("hello"), "b": speaker("byebye")}
    replay = record_replay(generators, "say", {"a": GREEDY, "b": Options(max_new=3)}, max_frames=4)
    assert [e.name for e in replay.entries] == ["a", "b"] and replay.prompt == "say"
    assert [e.frames[-1].segments for e in replay.entries] == [(("hello", True),), (("bye", True),)]
    assert replay.entries[0].decoding == "plain" and len(replay.entries[0].frames) == 4
    assert Replay.model_validate_json(replay.model_dump_json()) == replay
    with pytest.raises(ConfigError, match="got no entry"):
        record_replay({}, "", GREEDY)


def test_a_decodings_settings_are_named():
    generator = Generator(speaker("x").model, Unmasking(BYTES.mask_id, order="margin"), BYTES)
    assert module.describe_decoding(generator) == "unmasking, order margin"


def ended(*texts, prompt="", names=("alpha", "beta", "gamma")):
    """Tracks that are complete."""
    tracks = [
        Track(name, speaker(text), prompt, Options(temperature=0.0, max_new=40))
        for name, text in zip(names, texts, strict=False)
    ]
    race(tracks)
    return tracks


def test_side_by_side_where_there_is_room():
    tracks = ended("hello", "world")
    wide = printed(tracks, 100).splitlines()
    assert "alpha" in wide[0] and "beta" in wide[0] and "hello" in wide[1] and "world" in wide[1]
    assert max(map(len, wide)) <= 100
    narrow = printed(tracks, 60).splitlines()
    assert "alpha" in narrow[0] and "beta" not in narrow[0] and max(map(len, narrow)) <= 60
    assert any("beta" in line for line in narrow[2:])
    assert "6 calls" in " ".join(wide) and "6 tokens" in " ".join(wide)
    assert "step 6" in " ".join(wide)
    tight = printed(tracks, 34)
    assert tight.count("6 calls · 6 tokens") == 2 and "step" not in tight


def test_panels_fit_the_height_and_show_the_end():
    tracks = ended("abcdefghij" * 3 + "END", "short", prompt="long prompt " * 3)
    for width, lines in ((80, 5), (30, 10)):
        shown = printed(tracks, width, height=lines)
        assert len(shown.splitlines()) <= lines
        assert "END" in shown and "short" in shown


def test_what_does_not_know_yet_shows_unknown_places():
    track = Track("one", speaker("x"), "", GREEDY)
    assert "waiting" in printed([track], 60)
    track.snapshot = track._without_future(
        next(speaker("hello").snapshots("", Options(max_new=4, temperature=0.0)))
    )
    assert UNKNOWN * 3 not in printed([track], 60)
    track.snapshot = next(speaker("hello").snapshots("", Options(max_new=4, temperature=0.0)))
    assert "h" + UNKNOWN * 3 in printed([track], 60)


def test_no_control_character_reaches_the_terminal():
    tracks = ended(HOSTILE, prompt=HOSTILE, names=(HOSTILE,))
    shown = printed(tracks, 200)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)
    assert shown.count("[red]x[/red]") == 3 and r"\x1b[2J\x9b31m" in shown


def test_without_a_terminal_only_the_answers_are_printed():
    screen = console(90)
    tracks = [Track("a", speaker("hello"), "", GREEDY), Track("b", speaker("world"), "", GREEDY)]
    watch(tracks, screen)
    output = screen.file.getvalue()
    assert output.count("hello") == output.count("world") == 1 and "\x1b" not in output


def test_on_a_terminal_the_answers_stay():
    screen = console(90, terminal=True)
    tracks = [Track("a", speaker("hello"), "", GREEDY), Track("b", speaker("world"), "", GREEDY)]
    watch(tracks, screen)
    output = screen.file.getvalue()
    assert "hello" in output.splitlines()[-2] and "world" in output.splitlines()[-2]
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("terminal", [True, False])
def test_an_interrupt_leaves_what_was_written(terminal):
    screen = console(90, terminal=terminal)
    track = Track("a", speaker("hello"), "", GREEDY)
    step = track.step

    def interrupted():
        if track.steps == 3:
            raise KeyboardInterrupt
        return step()

    track.step = interrupted
    with pytest.raises(KeyboardInterrupt, match="answers are not complete"):
        watch([track], screen)
    output = screen.file.getvalue()
    assert "hel" in output and "hello" not in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h")


class Page(html.parser.HTMLParser):
    """Tags, attributes and the contents of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.text, self._in = [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._in = tag
        if tag == "script":
            self.scripts.append([dict(attributes), ""])

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        if self._in == "script":
            self.scripts[-1][1] += data
        elif self._in != "style":
            self.text += data


@pytest.fixture(scope="module")
def replay():
    """Two entries; the second knows places in any order."""
    first = [Frame(time_s=i / 10, nfe=i, tokens=i, segments=(("x" * i, True),)) for i in (1, 2, 3)]
    second = [
        Frame(time_s=0.2, nfe=1, tokens=1, segments=((UNKNOWN, False), ("b", True))),
        Frame(time_s=0.4, nfe=2, tokens=2, segments=((HOSTILE, True),)),
    ]
    return Replay(
        prompt=HOSTILE,
        entries=(
            ReplayEntry(name=HOSTILE, decoding="plain", frames=tuple(first)),
            ReplayEntry(name="two", decoding=HOSTILE, frames=tuple(second)),
        ),
    )


def test_the_page_needs_nothing_from_outside(replay):
    text = replay_html(replay)
    page = Page(text)
    for tag, attributes in page.tags:
        assert not {"src", "href", "action", "srcset"} & set(attributes), tag
        assert not any(key.startswith("on") for key in attributes), tag
    assert "url(" not in text and "@import" not in text and "fetch(" not in text
    (policy,) = [a["content"] for _, a in page.tags if "http-equiv" in a]
    (_, (kind, script)) = page.scripts
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert kind == {} and policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def test_the_page_holds_frames_and_no_foreign_markup(replay):
    text = replay_html(replay)
    page = Page(text)
    assert len(page.scripts) == 2 and "b" not in [t for t, a in page.tags if a.get("x")]
    (kind, data), _ = page.scripts
    assert kind["type"] == "application/json"
    read = json.loads(data)
    shown = HOSTILE.replace("\x1b", r"\x1b").replace("\x9b", r"\x9b")
    shown = shown.replace("\r", r"\x0d").replace("\x07", r"\x07")
    assert read["prompt"] == shown and [e["name"] for e in read["entries"]] == [shown, "two"]
    assert read["entries"][0]["frames"] == [
        [0.1, 1, 1, [["x", 1]]], [0.2, 2, 2, [["xx", 1]]], [0.3, 3, 3, [["xxx", 1]]]
    ]  # fmt: skip
    assert read["entries"][1]["frames"][0] == [0.2, 1, 1, [[UNKNOWN, 0], ["b", 1]]]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert page.text.count(shown) >= 4  # without scripts the last frames stand there


def test_the_page_is_small():
    frame = Frame(time_s=1.0, nfe=1, tokens=96, segments=((UNKNOWN * 2, False), ("ab", True)) * 24)
    entry = ReplayEntry(name="n", decoding="d", frames=(frame,) * 100)
    assert len(replay_html(Replay(prompt="p", entries=(entry,) * 5))) < 700_000


def test_written_whole_or_an_error(replay, tmp_path):
    write_replay(replay, tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == replay_html(replay)
    with pytest.raises(GenlabError):
        write_replay(replay, tmp_path / "a.html" / "b.html")
