"""A small trained network over the text of a prompt; here it only predicts."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.model_folder import Arrays, ModelFolder
from schedlab.policies.predictors.predictor import Floats
from schedlab.policies.predictors.prompts import Prompts
from schedlab.policies.predictors.sentence_encoder import SentenceEncoder, weights_digest
from schedlab.policies.predictors.text_features import bags, counts, hashed_ngrams
from schedlab.sim.errors import SpecError

Float32 = npt.NDArray[np.float32]

HASHED = "hashed"
KINDS = ("listmle", "pointwise", "buckets")
SLOPE_TOKENS = 1e-3
"""What a point of rank score adds to a length, so that equal quantiles keep their order."""

_LAYERS = ("mean", "deviation", "hidden", "hidden_bias", "output", "output_bias")
_HASHED_ARRAYS = ("rarity", "embedding")
_LENGTH_ARRAYS = {
    "listmle": ("score_quantiles", "length_quantiles"),
    "pointwise": (),
    "buckets": ("bucket_tokens",),
}


class TextModel:
    """Features of a prompt, one hidden layer of rectified units, and lengths made of the output.

    Features are counts of what the prompt holds, and either the sum of learned embeddings of its
    hashed n-grams or the vector of a pretrained sentence encoder. The output is a rank score
    (``listmle``), the logarithm of the length (``pointwise``) or a score for each class of
    lengths (``buckets``). A rank score becomes a length by the quantiles of both on prompts that
    were kept out of training: the order is the score's, the distribution that of the data.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    encoder : str
        ``"hashed"``, or as for `sentence_encoder.model_folder`.
    arrays : dict of str to ndarray
        The weights.
    """

    def __init__(self, kind: str, encoder: str, arrays: Arrays) -> None:
        self.kind = kind
        self.encoder = encoder
        self.arrays = arrays

    @classmethod
    def load(cls, folder: ModelFolder) -> TextModel:
        """Read a model.

        Raises
        ------
        SpecError
            If its weights are damaged or do not fit together, or the encoder that it was trained
            with is not there, or has other weights.
        """
        kind, encoder = folder.meta["kind"], folder.get("encoder", str)
        wanted = [*_LAYERS, *_LENGTH_ARRAYS[kind]]
        if encoder == HASHED:
            wanted += _HASHED_ARRAYS
        elif weights_digest(encoder) != folder.get("encoder_sha256", str):
            raise SpecError(f"{folder.path}: encoder {encoder} has other weights than in training")
        return cls(kind, encoder, folder.arrays(wanted))

    @cached_property
    def _sentences(self) -> SentenceEncoder:
        return SentenceEncoder(self.encoder)

    def lengths(self, prompts: Prompts) -> Floats:
        """Return the predicted output length of each prompt, in tokens, shape (len(prompts),)."""
        return self._lengths(self.outputs(prompts).astype(np.float64))

    def outputs(self, prompts: Prompts) -> Float32:
        """Return what the network says of each prompt, shape (len(prompts), num_outputs)."""
        plain = plain_features(prompts, None if self.encoder == HASHED else self._sentences)
        scaled = (plain - self.arrays["mean"]) / self.arrays["deviation"]
        if self.encoder == HASHED:
            table = self.arrays["embedding"]
            ngrams = [hashed_ngrams(text, len(table)) for text in prompts.text]
            summed = bags(ngrams, self.arrays["rarity"]).sums(table)
            scaled = np.concatenate([summed, scaled], axis=1)
        hidden = np.maximum(scaled @ self.arrays["hidden"] + self.arrays["hidden_bias"], 0)
        outputs: Float32 = hidden @ self.arrays["output"] + self.arrays["output_bias"]
        return outputs

    def _lengths(self, outputs: Floats) -> Floats:
        if self.kind == "pointwise":
            return np.exp(outputs[:, 0])
        if self.kind == "buckets":
            best = self.arrays["bucket_tokens"][outputs.argmax(axis=1)]
            return np.asarray(best, dtype=np.float64)
        score = outputs[:, 0]
        known = np.interp(score, self.arrays["score_quantiles"], self.arrays["length_quantiles"])
        return np.maximum(known + SLOPE_TOKENS * score, 0.0)

    def describe(self) -> dict[str, Any]:
        """Return what a results file says of it."""
        return {"kind": self.kind, "encoder": self.encoder}


def plain_features(prompts: Prompts, sentences: SentenceEncoder | None) -> Float32:
    """Return counts and, with an encoder, the vector of each prompt, shape (n, num_features)."""
    counted = np.array([counts(text) for text in prompts.text], dtype=np.float32)
    if sentences is None:
        return counted
    return np.concatenate([counted, sentences.embed(prompts.text)], axis=1)
