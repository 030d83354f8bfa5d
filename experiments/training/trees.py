"""Grow the random forest of Magnus' predictor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.forest import Forest, features
from schedlab.policies.predictors.model_folder import Arrays
from schedlab.policies.predictors.prompts import Prompts
from schedlab.policies.predictors.text_features import Bags, bags, hashed_ngrams, rarities
from schedlab.sim.errors import SpecError

NUM_NGRAM_BUCKETS = 1 << 15
NUM_TEXT_COMPONENTS = 32
NUM_TREES = 100
LEAST_LEAF_SIZE = 5
FEATURE_SHARE = 0.5


def train_forest(prompts: Prompts, output_tokens: npt.NDArray[np.int64], *, seed: int) -> Forest:
    """Grow 100 regression trees on one CPU thread: the same input gives the same trees.

    Parameters
    ----------
    prompts : Prompts
        What to learn from.
    output_tokens : ndarray of int64, shape (len(prompts),)
        The lengths to predict, by least squares.
    seed : int
        Of the bootstrap, of the features that each split looks at, and of the compression.

    Raises
    ------
    SpecError
        If scikit-learn is not installed.
    """
    load_sklearn()
    from sklearn.ensemble import RandomForestRegressor
    from threadpoolctl import threadpool_limits

    ngrams = [hashed_ngrams(text, NUM_NGRAM_BUCKETS) for text in prompts.text]
    rarity = rarities(ngrams, NUM_NGRAM_BUCKETS)
    packed = bags(ngrams, rarity)
    with threadpool_limits(1):
        projection = _components(packed, seed)
        applications = sorted({name for name in prompts.application if name})
        columns = features(prompts, applications, packed.sums(projection))
        grown = RandomForestRegressor(
            n_estimators=NUM_TREES,
            min_samples_leaf=LEAST_LEAF_SIZE,
            max_features=FEATURE_SHARE,
            random_state=seed,
            n_jobs=1,
        ).fit(columns, output_tokens.astype(np.float64))
    text: Arrays = {"rarity": rarity, "projection": projection}
    return Forest(applications, text | nodes(grown.estimators_))


def load_sklearn() -> None:
    """Import scikit-learn, or say how to get it.

    Raises
    ------
    SpecError
        If it is not installed.
    """
    try:
        import sklearn.ensemble  # noqa: F401
    except ImportError as error:
        raise SpecError(
            "training a random forest needs scikit-learn: pip install 'schedlab[predictors]'"
        ) from error


def _components(packed: Bags, seed: int) -> npt.NDArray[np.float32]:
    """Return the directions in which prompts differ most, shape (num_buckets, width)."""
    from scipy.sparse import csr_array
    from sklearn.decomposition import TruncatedSVD

    shape = (len(packed), NUM_NGRAM_BUCKETS)
    matrix = csr_array((packed.weight, packed.bucket, packed.offset), shape=shape)
    width = min(NUM_TEXT_COMPONENTS, len(packed) - 1)
    found = TruncatedSVD(width, random_state=seed).fit(matrix).components_.T
    return np.ascontiguousarray(found, dtype=np.float32)


def nodes(trees: list[Any]) -> Arrays:
    """Return the nodes of scikit-learn's trees in one numbering, as `Forest` wants them.

    Parameters
    ----------
    trees : list of sklearn.tree.DecisionTreeRegressor
        Fitted trees.

    Returns
    -------
    dict of str to ndarray
        ``roots``, shape (num_trees,), and a row a node of ``feature`` (-1 in leaves),
        ``threshold``, ``left``, ``right`` and ``value``.
    """
    sizes = [tree.tree_.node_count for tree in trees]
    roots = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    for root, tree in zip(roots, trees, strict=True):
        nodes = tree.tree_
        leaf = nodes.children_left < 0
        columns = {
            "feature": np.where(leaf, -1, nodes.feature).astype(np.int32),
            "threshold": nodes.threshold,
            "left": np.where(leaf, 0, nodes.children_left + root).astype(np.int32),
            "right": np.where(leaf, 0, nodes.children_right + root).astype(np.int32),
            "value": nodes.value[:, 0, 0],
        }
        for name, column in columns.items():
            parts.setdefault(name, []).append(column)
    return {"roots": roots} | {name: np.concatenate(part) for name, part in parts.items()}
