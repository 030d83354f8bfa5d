"""The tokens that the names of prompts' blocks stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedlab.gpu_backend.sequences import Int64
from schedlab.sim.errors import SchedlabError
from schedlab.sim.request import Request
from schedlab.sim.rng import stream


class NamedTokens:
    """Gives prompts whose blocks are equal where their names are, so that KV may be shared.

    A name stands for the same random tokens wherever it comes up; the name of a block of an answer
    for what the model has generated there. What a prompt has behind its named blocks is random by
    its request's id.

    Parameters
    ----------
    seed, vocab_size : int
        Of random tokens.
    block_size : int
        Tokens that a name stands for.
    """

    def __init__(self, seed: int, vocab_size: int, block_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._tokens: dict[int, Int64] = {}

    def __call__(self, request: Request) -> Int64:
        """Return the token ids of a request's prompt."""
        num_full = request.prompt_tokens // self._block_size
        parts = [self._of(name) for name in request.prefix_hash_ids[:num_full]]
        left = request.prompt_tokens - len(parts) * self._block_size
        return np.concatenate([*parts, self._random(f"prompt/{request.id}", left)])

    def answered(self, names: Sequence[int], tokens: Int64) -> None:
        """Learn what was generated, at least so many blocks of it as there are names.

        Raises
        ------
        SchedlabError
            If a name stands for something else already.
        """
        for place, name in enumerate(names):
            block = tokens[place * self._block_size : (place + 1) * self._block_size]
            known = self._tokens.setdefault(name, block.copy())
            if not np.array_equal(known, block):
                raise SchedlabError(
                    f"the workload gives two different blocks the name {name}: an answer there is "
                    "what the model generates, and not what it quotes; set "
                    "engine.enable_prefix_caching: false"
                )

    def _of(self, name: int) -> Int64:
        tokens = self._tokens.get(name)
        if tokens is None:
            tokens = self._tokens[name] = self._random(f"block/{name}", self._block_size)
        return tokens

    def _random(self, what: str, count: int) -> Int64:
        return stream(self._seed, what).integers(0, self._vocab_size, count)
