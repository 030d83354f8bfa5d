"""Token ids of prompts that share what the trace says they share."""

from __future__ import annotations

import numpy as np

from schedlab.sim.request import Request
from schedlab.sim.rng import stream


def prompt_ids(request: Request, vocab_size: int, seed: int, block_size: int) -> list[int]:
    """Return random token ids for a prompt; blocks of equal names get equal ids.

    Parameters
    ----------
    request : Request
        Whose `prefix_hash_ids` name the whole blocks of its prompt, if the trace says any.
    vocab_size : int
        Ids are below it.
    seed : int
        Of all of them.
    block_size : int
        Tokens that a name stands for.

    Returns
    -------
    list of int
        ``request.prompt_tokens`` of them.
    """
    parts = [
        stream(seed, f"block/{name}").integers(0, vocab_size, block_size)
        for name in request.prefix_hash_ids[: request.prompt_tokens // block_size]
    ]
    left = request.prompt_tokens - block_size * len(parts)
    parts.append(stream(seed, f"prompt/{request.id}").integers(0, vocab_size, left))
    ids: list[int] = np.concatenate(parts).tolist()
    return ids
