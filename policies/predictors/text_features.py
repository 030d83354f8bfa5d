"""What a trained model sees of a prompt: hashed n-grams, and counts of what is in it."""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.predictor import Floats

_TOKEN = re.compile(r"[a-z]+|[0-9]|[^\sa-z0-9]")
_OPENING_TOKENS = 6
_PIECE_CHARS = 4
_PROMPTS_AT_ONCE = 1024

COUNTS = (
    "characters", "words", "digits", "lines", "marks", "formulas", "word_length", "asks",
    "capitals",
)  # fmt: skip
"""What `counts` returns, in order."""


def hashed_ngrams(text: str, num_buckets: int) -> npt.NDArray[np.int64]:
    """Return the distinct n-grams of a prompt as buckets, ascending.

    Words, pairs of words, the opening words with their place (where an instruction says what is
    wanted), and pieces of four characters of longer words (so that forms of a word share some).

    Parameters
    ----------
    text : str
        The prompt; its case is ignored.
    num_buckets : int
        Buckets are 0..num_buckets-1, by CRC-32: the same on every machine.

    Returns
    -------
    ndarray of int64, shape (num_distinct,)

    Examples
    --------
    >>> hashed_ngrams("Count to 10", 1000).tolist() == hashed_ngrams("count TO 10", 1000).tolist()
    True
    """
    tokens = _TOKEN.findall(text.lower())
    grams = [*tokens, *(f"{a} {b}" for a, b in pairwise(tokens))]
    grams += [f"^{place} {token}" for place, token in enumerate(tokens[:_OPENING_TOKENS])]
    for token in set(tokens):
        if len(token) >= _PIECE_CHARS:
            word = f"<{token}>"
            last = len(word) - _PIECE_CHARS
            grams += [f"#{word[i : i + _PIECE_CHARS]}" for i in range(last + 1)]
    hashed = {zlib.crc32(gram.encode("utf-8", "replace")) % num_buckets for gram in grams}
    return np.array(sorted(hashed), dtype=np.int64)


def counts(text: str) -> list[float]:
    """Return how much of what there is in a prompt, as log(1 + count) but for the mean and flag.

    Returns
    -------
    list of float
        In the order of `COUNTS`.
    """
    words = text.split()
    letters = sum(map(len, words))
    return [
        math.log1p(len(text)),
        math.log1p(len(words)),
        math.log1p(sum(c.isdigit() for c in text)),
        math.log1p(text.count("\n")),
        math.log1p(sum(not c.isalnum() and not c.isspace() for c in text)),
        math.log1p(text.count("$") + text.count("\\")),
        letters / max(len(words), 1),
        float("?" in text),
        math.log1p(sum(c.isupper() for c in text)),
    ]


@dataclass(frozen=True, slots=True)
class Bags:
    """N-grams of many prompts with their weights, one prompt after another.

    Attributes
    ----------
    bucket, weight : ndarray of int64 and float32, shape (num_ngrams,)
        The n-grams.
    offset : ndarray of int64, shape (num_prompts + 1,)
        Where each prompt's begin and end.
    """

    bucket: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32]
    offset: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offset) - 1

    def take(self, rows: npt.NDArray[np.int64]) -> Bags:
        """Return the n-grams of some of the prompts."""
        size = np.diff(self.offset)[rows]
        offset = np.concatenate([[0], np.cumsum(size)])
        chosen = np.arange(offset[-1]) + np.repeat(self.offset[rows] - offset[:-1], size)
        return Bags(self.bucket[chosen], self.weight[chosen], offset)

    def sums(self, table: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the weighted sum of each prompt's rows of a table, shape (num_prompts, width)."""
        out = np.zeros((len(self), table.shape[1]), dtype=np.float32)
        filled = np.flatnonzero(np.diff(self.offset))
        # In parts, or the rows of a large trace would take gigabytes.
        for part in np.array_split(filled, -(-len(filled) // _PROMPTS_AT_ONCE) or 1):
            if len(part):
                ngrams = slice(self.offset[part[0]], self.offset[part[-1] + 1])
                rows = table[self.bucket[ngrams]] * self.weight[ngrams, None]
                starts = self.offset[part] - self.offset[part[0]]
                out[part] = np.add.reduceat(rows, starts, axis=0)
        return out


def bags(ngrams: list[npt.NDArray[np.int64]], rarity: Floats) -> Bags:
    """Weigh the n-grams of prompts by their rarity, the squares of a prompt's adding up to 1.

    Parameters
    ----------
    ngrams : list of ndarray of int64
        What `hashed_ngrams` gave for each prompt.
    rarity : ndarray of float64, shape (num_buckets,)
        What `rarities` gave in training; n-grams of rarity 0 are left out.
    """
    known = [grams[rarity[grams] > 0] for grams in ngrams]
    size = np.array([len(grams) for grams in known], dtype=np.int64)
    bucket = np.concatenate([np.empty(0, dtype=np.int64), *known])
    weight = rarity[bucket]
    row = np.repeat(np.arange(len(known)), size)
    norm = np.sqrt(np.bincount(row, weight**2, minlength=len(known)))
    offset = np.concatenate([[0], np.cumsum(size)])
    return Bags(bucket, (weight / norm[row]).astype(np.float32), offset)


def rarities(ngrams: list[npt.NDArray[np.int64]], num_buckets: int, least: int = 2) -> Floats:
    """Return log((1 + n) / (1 + documents with it)) + 1 of each bucket, 0 below `least` documents.

    Parameters
    ----------
    ngrams : list of ndarray
        The n-grams of the training prompts.
    num_buckets : int
        How many buckets there are.
    least : int
        Documents an n-gram must be in.

    Returns
    -------
    ndarray of float64, shape (num_buckets,)
    """
    documents = np.zeros(num_buckets)
    for grams in ngrams:
        documents[grams] += 1
    weights = np.log((1 + len(ngrams)) / (1 + documents)) + 1
    weights[documents < least] = 0.0
    return np.asarray(weights)
