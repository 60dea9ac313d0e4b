"""Floors: closed forms, and the published figures of the embedded corpus."""

import lzma
import math
from pathlib import Path

import genlab
import numpy as np
import pytest
from genlab.errors import DataError
from genlab.eval import floors
from genlab.eval.ngram import NgramModel

AUSTEN = Path(genlab.__file__).parent / "train" / "data" / "corpora" / "austen"


def test_uniform_over_bytes_and_tokens():
    """The 13 bytes of "héllo wörld" under 256 equally likely ids: 8 bits per byte."""
    text = "héllo wörld".encode()
    window = [256, *text]
    assert len(text) == 13
    assert floors.uniform_bytes_floor().bits_per_byte == 8
    floor = floors.uniform_tokens_floor([window], [13], vocab_size=256, bos_id=256)
    assert floor.bits_per_byte == pytest.approx(8, rel=1e-12)
    assert 2 ** (floor.bits_per_byte * 13 / 2) == pytest.approx(256**6.5, rel=1e-9)  # two words


def test_uniform_tokens_counts_bytes_not_tokens():
    floor = floors.uniform_tokens_floor([[9, 1, 2, 3], [9, 4]], [6, 2], vocab_size=16, bos_id=9)
    assert floor.bits_per_byte == pytest.approx(4 * 4 / 8, rel=1e-12)
    assert floor.ci95 is None


def test_ngram_floor_is_nats_over_the_bytes():
    rng = np.random.default_rng(0)
    rows = [[8, *rng.integers(0, 8, 256).tolist()] for _ in range(200)]
    model = NgramModel.fit(rows, vocab_size=9, bos_id=8, order=1)
    floor = floors.ngram_floor(model, rows, [512] * 200)
    nats = model.nats(rows).nats.sum()
    assert floor.bits_per_byte == pytest.approx(nats / (math.log(2) * 512 * 200), rel=1e-12)
    assert floor.name == "unigram"
    low, high = floor.ci95
    assert low < floor.bits_per_byte < high


def test_window_bytes_must_belong_to_the_windows():
    model = NgramModel.fit([[8, 1, 2]], vocab_size=9, bos_id=8, order=1)
    with pytest.raises(DataError, match="2 windows but byte counts for 3"):
        floors.ngram_floor(model, [[8, 1], [8, 2]], [1, 1, 1])


def test_xz_size_is_that_of_preset_9e():
    data = lzma.open(AUSTEN / "northanger_abbey.txt.xz").read()[:120_000]
    plain = len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    assert floors.xz_size(data) == plain


def test_xz_given_text_finds_repeats_beyond_any_small_dictionary():
    noise = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
    alone, given = floors.xz_floors([noise, b"x" * 10], noise[:40_000])
    assert alone.bits_per_byte > 7.99
    assert given.bits_per_byte < 0.25  # LZMA copies at most 273 bytes at a time; unseen, 8
    assert "2 training texts" in given.detail


def test_empty_held_out_text_is_refused():
    with pytest.raises(DataError, match="held-out text is empty"):
        floors.xz_floors([b"abc"], b"")


def test_all_floors_and_the_byte_check():
    text = b"abcdefgh" * 600
    windows = [[256, *text[i : i + 255]] for i in range(0, len(text), 255)]
    sizes = [len(window) - 1 for window in windows]
    kwargs = dict(
        train_sequences=windows, windows=windows, train_documents=[text], vocab_size=260, bos_id=256
    )
    found = floors.all_floors(window_bytes=sizes, test=text, order=3, **kwargs)
    assert [floor.name for floor in found] == [
        "uniform bytes", "uniform tokens", "unigram", "3-gram", "xz", "xz given training text",
    ]  # fmt: skip
    assert found[2].bits_per_byte == pytest.approx(3, abs=0.01)  # eight equally frequent bytes
    assert found[3].bits_per_byte < 0.1  # and each follows from the one before
    with pytest.raises(DataError, match="spell 4799 bytes but the held-out text has 4800"):
        floors.all_floors(window_bytes=[*sizes[:-1], sizes[-1] - 1], test=text, **kwargs)


@pytest.mark.slow
def test_xz_floors_of_persuasion():
    """Persuasion alone 2.470; given the other five novels in the order of their names 2.141."""
    texts = {p.name: lzma.open(p).read() for p in sorted(AUSTEN.glob("*.txt.xz"))}
    test = texts.pop("persuasion.txt.xz")
    assert len(texts) == 5
    alone, given = floors.xz_floors(list(texts.values()), test)
    assert alone.bits_per_byte == pytest.approx(2.470, abs=5e-4)
    assert given.bits_per_byte == pytest.approx(2.141, abs=5e-4)
