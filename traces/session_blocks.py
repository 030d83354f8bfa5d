"""The names of the KV blocks of sessions: a prompt begins with what was said before it."""

from __future__ import annotations

from collections.abc import Iterator

from schedlab.traces.turns import Shared


class SessionBlocks:
    """Names the full blocks of prompts and answers, session by session.

    The prompt of a request begins with prompt and answer of the first request that it needs, unless
    it is too short for that: then nobody knows what is in it, and it shares nothing. What other
    requests have answered, and what is new, follows and is its own. A request that needs nobody
    begins with what it shares with others. Equal names mean equal tokens up to the end of a block.

    Parameters
    ----------
    block_tokens : int
        Tokens in a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._next = 0
        self._shared: dict[Shared, list[int]] = {}
        self._session: str | None = None
        self._sequences: dict[int, tuple[tuple[int, ...], int]] = {}

    def name(
        self,
        row: int,
        session: str | None,
        needs: int | None,
        tokens: tuple[int, int],
        shared: Shared | None,
    ) -> tuple[int, ...]:
        """Return the names of the full blocks of a request, prompt and answer together.

        Parameters
        ----------
        row : int
            Which; the rows of a session come one behind the other.
        session : str or None
            Its session.
        needs : int or None
            The row that its prompt goes on from.
        tokens : (int, int)
            Of prompt and answer.
        shared : Shared or None
            What it begins with otherwise.
        """
        if session != self._session or session is None:
            self._session = session
            self._sequences.clear()
        size, (prompt, answer) = self._block_tokens, tokens
        inherited: tuple[int, ...] = ()
        if needs is not None:
            names, length = self._sequences[needs]
            inherited = names[: length // size] if length <= prompt else ()
        elif shared:
            inherited = tuple(self._shared_names(shared, prompt // size))
        fresh = (prompt + answer) // size - len(inherited)
        names = (*inherited, *range(self._next, self._next + fresh))
        self._next += fresh
        self._sequences[row] = names, prompt + answer
        return names

    def _shared_names(self, shared: Shared, most: int) -> Iterator[int]:
        """Yield the names of the blocks that end within what is shared."""
        end = 0
        first = 0
        for k, (_, tokens) in enumerate(shared):
            end += tokens
            last = min(end // self._block_tokens, most)
            # A block belongs to the part it ends in, and depends on all before it.
            known = self._shared.setdefault(shared[: k + 1], [])
            while len(known) < last - first:
                known.append(self._next)
                self._next += 1
            yield from known[: max(last - first, 0)]
            first = max(first, end // self._block_tokens)
