"""The tokens of every request: prompts, and what the model has generated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from schedlab.sim.request import Request
from schedlab.sim.rng import stream

Int64 = npt.NDArray[np.int64]
PromptIds = Callable[[Request], Int64]
"""Gives the token ids of a request's prompt, ``request.prompt_tokens`` of them."""


def random_prompts(seed: int, vocab_size: int) -> PromptIds:
    """Return prompts of uniformly random tokens, each from its request's id alone."""

    def prompt_ids(request: Request) -> Int64:
        rng = stream(seed, f"prompt/{request.id}")
        return rng.integers(0, vocab_size, request.prompt_tokens)

    return prompt_ids


class Sequences:
    """Token ids by request, and by seat while a request has one.

    Seated sequences are rows of one array, so that a step reads and writes the tokens of its
    whole batch at once; a request that loses its seat takes its tokens along.

    Parameters
    ----------
    max_num_seqs, max_model_len : int
        Seats, and tokens of the longest sequence.
    prompt_ids : callable
        Gives the prompts, when a request is first seated.

    Attributes
    ----------
    tokens : ndarray of int32, shape (max_num_seqs, max_model_len)
        Tokens by seat.
    last_index : ndarray of int64, shape (max_num_seqs,)
        Index of the last token that the request in a seat will generate.
    ids : ndarray of int64, shape (max_num_seqs,)
        Request in each seat.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, prompt_ids: PromptIds) -> None:
        self.tokens = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.last_index = np.zeros(max_num_seqs, dtype=np.int64)
        self.ids = np.zeros(max_num_seqs, dtype=np.int64)
        self._prompt_ids = prompt_ids
        self._output_tokens: dict[int, int] = {}
        self._away: dict[int, Int64] = {}
        self._generated: dict[int, Int64] = {}

    def add(self, request: Request, output_tokens: int) -> None:
        """Learn of a request and its true output length."""
        self._output_tokens[request.id] = output_tokens

    def output_tokens(self, request: Request) -> int:
        """Return a request's true output length."""
        return self._output_tokens[request.id]

    def sit(self, request: Request, seat: int) -> None:
        """Put a request's tokens, the prompt at least, into a seat."""
        tokens = self._away.pop(request.id, None)
        if tokens is None:
            tokens = self._prompt_ids(request)
            if len(tokens) != request.prompt_tokens:
                raise ValueError(
                    f"request {request.id}: {len(tokens)} prompt ids for "
                    f"{request.prompt_tokens} prompt tokens"
                )
        self.tokens[seat, : len(tokens)] = tokens
        self.ids[seat] = request.id
        length = min(self._output_tokens[request.id], request.max_tokens)
        self.last_index[seat] = request.prompt_tokens + length - 1

    def leave(self, request: Request, seat: int, num_tokens: int) -> None:
        """Take a request's first `num_tokens` tokens out of its seat."""
        tokens = self.tokens[seat, :num_tokens].astype(np.int64)
        if request.id in self._output_tokens:
            self._away[request.id] = tokens
        self._generated[request.id] = tokens[request.prompt_tokens :]

    def forget(self, request: Request) -> None:
        """Drop what is only needed to go on with a request."""
        self._output_tokens.pop(request.id, None)
        self._away.pop(request.id, None)

    def generated(self, request_id: int) -> Int64:
        """Return the tokens that a request had generated when it last gave up its seat.

        Raises
        ------
        KeyError
            If it never did.
        """
        return self._generated[request_id]
