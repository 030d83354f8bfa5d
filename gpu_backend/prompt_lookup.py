"""Drafts from what a sequence has said before: no model, a look-up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


def look_up(tokens: Int32, most: int, shortest: int, longest: int) -> Int32:
    """Return the tokens that followed the last few where they stood before.

    Parameters
    ----------
    tokens : ndarray of int32, shape (L,)
        Prompt and answer so far.
    most : int
        Most tokens to return.
    shortest, longest : int
        Of how many last tokens an earlier place is looked for: the more the better.

    Returns
    -------
    ndarray of int32, shape (n,)
        ``n <= most``; empty where nothing is found.

    Notes
    -----
    Of several places with equally many tokens in common the first counts, as in vLLM
    (`vllm/v1/spec_decode/ngram_proposer.py`, ``_find_longest_matched_ngram_and_propose_tokens``).

    Examples
    --------
    >>> look_up(np.array([5, 6, 7, 8, 9, 5, 6], dtype=np.int32), 3, 2, 4).tolist()
    [7, 8, 9]
    """
    end = len(tokens)
    for size in range(min(longest, end - 1), shortest - 1, -1):
        # An earlier place has a successor: it ends before the last token.
        found = np.ones(end - size, dtype=bool)
        for i in range(size):
            found &= tokens[i : i + end - size] == tokens[end - size + i]
        first = int(found.argmax())
        if found[first]:
            return tokens[first + size : first + size + most]
    return tokens[:0]
