"""What a reader is: a name, a way to recognise its files, and a way to read them in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from schedlab.traces.readers.source import Peek
from schedlab.traces.trace import Trace


@dataclass(frozen=True)
class ReadOptions:
    """How to read a file, as far as the user has a say.

    Attributes
    ----------
    chunk_rows : int
        Rows read at a time.
    tokenizer : str
        Who counts the tokens of a text: see `schedlab.traces.tokenizer.token_counter`.
    default_output_tokens : int or None
        Output length of prompts whose file gives none.
    drop_empty : bool
        Leave rows without prompt or output tokens out, and count them, instead of raising.
    sessions : bool
        Say which requests of a session wait for the answers of others (`Trace.turns`).
    """

    chunk_rows: int = 65536
    tokenizer: str = "auto"
    default_output_tokens: int | None = None
    drop_empty: bool = False
    sessions: bool = False

    @property
    def empty_reason(self) -> str | None:
        """Why rows without tokens are left out; `None` if they are an error."""
        return "no prompt or no output tokens" if self.drop_empty else None


class Reader(NamedTuple):
    """One file format."""

    name: str
    """How users name the format."""
    summary: str
    """One line on what it is."""
    sniff: Callable[[Peek], bool]
    """Tell from the beginning of a file whether it has this format."""
    chunks: Callable[[Path, ReadOptions], Iterator[Trace]]
    """Yield the file as traces of at most `chunk_rows` rows, in file order; sessions as a whole."""
    follows_sessions: bool = False
    """Whether `ReadOptions.sessions` makes a difference."""
