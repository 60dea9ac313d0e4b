"""From one row's ids to text that can be shown: whole characters, and nothing of a stop string."""

from collections.abc import Iterable, Sequence

from ..errors import ConfigError
from ..train.data.tokenizer import Tokenizer


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings.

    Raises:
        ConfigError: one is empty (it would stop everything).
    """
    if isinstance(stops, str):
        raise ConfigError(f"stop: got the string {stops!r}, want a list of strings")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ConfigError(f"stop: got {stop!r}, want strings of at least one character")
    return tuple(stops)


class TextStream:
    """Reads settled ids one by one; gives text as soon as nothing can take it back.

    Text that may be the beginning of a stop string is held until it is clear whether it is one. The
    pieces of `push` and `finish` join to `text`, which is all text before the stop.

    Attributes:
        ids: what was read: up to and with the id that completed a stop string or is a stop id.
        text: what was given out.
        stopped: True after a stop string or a stop id; later ids are ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        continuing: bool = False,
    ) -> None:
        """Takes stop strings, ids that end the row, and whether text stands before its first id."""
        self._decoder = tokenizer.streaming_decoder(continuing=continuing)
        self._stops = check_stops(stops)
        self._stop_ids = frozenset(int(i) for i in stop_ids)
        self._held = ""
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False

    def push(self, ids: Iterable[int]) -> str:
        """Reads ids and returns the text that became certain."""
        given = ""
        for one in ids:
            if self.stopped:
                break
            self.ids.append(int(one))
            if int(one) in self._stop_ids:
                given += self.finish()
                self.stopped = True
            else:
                given += self._take(self._decoder.push([one]), final=False)
        return given

    def finish(self) -> str:
        """Returns what is still held: no id will follow."""
        return "" if self.stopped else self._take(self._decoder.flush(), final=True)

    def _take(self, text: str, *, final: bool) -> str:
        pending = self._held + text
        begins = [at for at in map(pending.find, self._stops) if at >= 0]
        if begins:
            self.stopped = True
            given, self._held = pending[: min(begins)], ""
        else:
            keep = 0 if final else self._undecided(pending)
            given, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += given
        return given

    def _undecided(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self._stops):
                return length
        return 0
