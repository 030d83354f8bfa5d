"""Which KV blocks hold which content: what a prefix cache looks up."""

from __future__ import annotations

from schedlab.sim.kv.free_queue import Run
from schedlab.sim.kv.ledger import NO_HIT, Hit
from schedlab.sim.kv.prompt import STRETCH_BLOCKS, Prompt


class PrefixIndex:
    """The runs of blocks with content, by their names, and who remembers what they found there.

    Equal prompts computed side by side fill several blocks with one content: the first run that
    has a name is found. What a waiting request found is remembered until a run that it met, or
    where it stopped, changes.

    Parameters
    ----------
    block_size : int
        Tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # Both by stretch of names, their quotient by STRETCH_BLOCKS.
        self._runs: dict[int, list[Run]] = {}
        self._watchers: dict[int, dict[int, Prompt]] = {}

    def may_hold(self, prompt: Prompt) -> bool:
        """Whether there are names beside the first one of a prompt, without which it has no hit."""
        stretches = prompt.stretches
        return bool(stretches) and stretches[0][0] // STRETCH_BLOCKS in self._runs

    def knows(self, name: int) -> bool:
        """Whether there is a block that has a name."""
        runs = self._runs.get(name // STRETCH_BLOCKS)
        return runs is not None and _first_with(runs, name, name + 1)[0] is not None

    def find(self, prompt: Prompt, most: int) -> tuple[Hit, list[int]]:
        """Return what is there of a prompt's first `most` blocks, and the stretches met."""
        parts: list[tuple[Run, int, int]] = []
        met: list[int] = []
        num_blocks = in_use = 0
        for first, count in prompt.stretches:
            key, end = first, first + min(count, most - num_blocks)
            if key == end:
                break
            stretch = key // STRETCH_BLOCKS
            met.append(stretch)
            runs = self._runs.get(stretch)
            while runs is not None and key < end:
                run, stop = _first_with(runs, key, end)
                if run is None:
                    break
                parts.append((run, key, stop - key))
                if run.holders:
                    in_use += stop - key
                key = stop
            num_blocks += key - first
            if key < end:
                break
        if not parts:
            return NO_HIT, met
        return Hit(num_blocks * self._block_size, in_use, num_blocks, tuple(parts)), met

    def remember(self, request_id: int, prompt: Prompt, met: list[int]) -> None:
        """Let a prompt forget its hit as soon as something changes in the stretches met."""
        for stretch in met:
            self._watchers.setdefault(stretch, {})[request_id] = prompt

    def has_changed(self, run: Run) -> None:
        """Let those look again who met the stretch of a run."""
        watchers = self._watchers.pop(_stretch(run), None)
        if watchers is not None:
            for prompt in watchers.values():
                prompt.hit = None

    def add(self, run: Run) -> None:
        """Index a run behind all that have the same names."""
        self.put(run, len(self._runs.get(_stretch(run), ())))

    def put(self, run: Run, place: int) -> None:
        """Index a run at a place among those of its stretch."""
        self._runs.setdefault(_stretch(run), []).insert(place, run)
        self.has_changed(run)

    def drop(self, run: Run) -> int:
        """Take a run out; return its place among those of its stretch."""
        stretch = _stretch(run)
        runs = self._runs[stretch]
        place = runs.index(run)
        del runs[place]
        if not runs:
            del self._runs[stretch]
        self.has_changed(run)
        return place

    def split(self, run: Run, upper: Run) -> None:
        """Index the last blocks of a run as one of their own: what is found stays the same."""
        runs = self._runs[_stretch(run)]
        runs.insert(runs.index(run) + 1, upper)

    def check(self) -> None:
        """Raise AssertionError unless every run lies in the stretch of its names."""
        for stretch, runs in self._runs.items():
            assert runs, "a stretch of names without blocks"
            for run in runs:
                assert run.key is not None, "a name is off"
                assert run.count > 0, "an empty run has a name"
                first, last = run.key, run.key + run.count - 1
                assert first // STRETCH_BLOCKS == stretch == last // STRETCH_BLOCKS, "a name is off"


def _stretch(run: Run) -> int:
    assert run.key is not None
    return run.key // STRETCH_BLOCKS


def _first_with(runs: list[Run], key: int, end: int) -> tuple[Run | None, int]:
    """Return the first run that has a name, and up to where it is the first, `end` at most."""
    for run in runs:
        assert run.key is not None
        if key < run.key:
            if run.key < end:
                end = run.key  # from there on this one comes first, if it lasts
        elif key < run.key + run.count:
            return run, min(end, run.key + run.count)
    return None, end
