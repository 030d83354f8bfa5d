"""A random forest over application, text and length; here it only predicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.model_folder import Arrays, ModelFolder
from schedlab.policies.predictors.predictor import Floats
from schedlab.policies.predictors.prompts import Prompts
from schedlab.policies.predictors.text_features import bags, counts, hashed_ngrams

FOREST = "random_forest"
_ARRAYS = (
    "rarity", "projection", "roots", "feature", "threshold", "left", "right", "value",
)  # fmt: skip


class Forest:
    """Magnus' predictor: the mean of regression trees over what is known at arrival.

    Features are the application (one indicator each; none for one that training did not see),
    the text (its hashed n-grams, compressed), counts of what is in it, and the prompt's length.
    Trees are arrays of nodes: a request goes left where its feature is at most the threshold.

    Parameters
    ----------
    applications : sequence of str
        The applications seen in training.
    arrays : dict of str to ndarray
        ``rarity`` and ``projection`` of n-grams, ``roots`` of the trees and the nodes.

    Notes
    -----
    Magnus compresses LaBSE sentence embeddings; here n-grams are compressed by singular values.
    """

    def __init__(self, applications: Sequence[str], arrays: Arrays) -> None:
        self.applications = list(applications)
        self.arrays = arrays

    @classmethod
    def load(cls, folder: ModelFolder) -> Forest:
        """Read a model.

        Raises
        ------
        SpecError
            If its weights are damaged or something is missing.
        """
        return cls(folder.get("applications", list), folder.arrays(_ARRAYS))

    def lengths(self, prompts: Prompts) -> Floats:
        """Return the predicted output length of each prompt, in tokens, shape (len(prompts),)."""
        ngrams = [hashed_ngrams(text, len(self.arrays["rarity"])) for text in prompts.text]
        text = bags(ngrams, self.arrays["rarity"]).sums(self.arrays["projection"])
        return self.trees(features(prompts, self.applications, text))

    def trees(self, columns: npt.NDArray[np.float32]) -> Floats:
        """Return the mean of all trees' predictions, shape (num_rows,)."""
        a = self.arrays
        rows = np.arange(len(columns))
        node = np.repeat(a["roots"][:, None], len(columns), axis=1)
        while True:
            feature = a["feature"][node]
            inner = feature >= 0
            if not inner.any():
                values: Floats = a["value"][node].mean(axis=0)
                return values
            # Leaves have feature -1: any column will do there.
            below = columns[rows, np.maximum(feature, 0)] <= a["threshold"][node]
            node = np.where(inner, np.where(below, a["left"][node], a["right"][node]), node)


def features(
    prompts: Prompts, applications: Sequence[str], text: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return the columns that the trees ask for, shape (len(prompts), num_features).

    Parameters
    ----------
    prompts : Prompts
        The requests.
    applications : sequence of str
        Those that have an indicator.
    text : ndarray of float32, shape (len(prompts), width)
        Compressed n-grams of the prompts.
    """
    from_app = np.array(
        [[app == known for known in applications] for app in prompts.application], dtype=np.float32
    ).reshape(len(prompts), len(applications))
    counted = np.array([counts(prompt) for prompt in prompts.text], dtype=np.float32)
    length = np.log1p(prompts.prompt_tokens).astype(np.float32)[:, None]
    return np.concatenate([length, from_app, counted, text], axis=1)
