"""Train the network of `TextModel`: one hidden layer over the text of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.model_folder import Arrays
from schedlab.policies.predictors.prompts import Prompts
from schedlab.policies.predictors.sentence_encoder import SentenceEncoder
from schedlab.policies.predictors.text_features import bags, hashed_ngrams, rarities
from schedlab.policies.predictors.text_model import HASHED, Float32, TextModel, plain_features
from schedlab.sim.errors import SpecError
from schedlab.sim.rng import stream

if TYPE_CHECKING:
    from torch import Tensor

NUM_NGRAM_BUCKETS = 1 << 15
EMBEDDING_WIDTH = 32
HIDDEN_UNITS = 64
LIST_SIZE = 64
LEARNING_RATE = 2e-3
NUM_EPOCHS = 6
LEAST_STEPS = 400
DROPOUT = 0.3
NGRAM_DROPOUT = 0.4
AVERAGED_STEPS = 400
CALIBRATION_SHARE = 0.1
NUM_QUANTILES = 101

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """Prompts in the form the network takes, with the lengths it is to learn.

    Attributes
    ----------
    encoder : str
        Who makes vectors of the text.
    plain : ndarray of float32, shape (n, num_features)
        Counts, and the sentence vectors if there is an encoder.
    ngrams : list of ndarray of int64
        Hashed n-grams; empty arrays with an encoder.
    output_tokens : ndarray of int64, shape (n,)
        The truth.
    """

    encoder: str
    plain: Float32
    ngrams: list[Int64]
    output_tokens: Int64

    def take(self, rows: Int64) -> Examples:
        """Return some of the rows."""
        ngrams = [self.ngrams[i] for i in rows]
        return Examples(self.encoder, self.plain[rows], ngrams, self.output_tokens[rows])

    def __len__(self) -> int:
        return len(self.output_tokens)


def examples(prompts: Prompts, output_tokens: Int64, encoder: str) -> Examples:
    """Make features of prompts, once for all trainings with them.

    Raises
    ------
    SpecError
        If the encoder is not there.
    """
    if encoder == HASHED:
        ngrams = [hashed_ngrams(text, NUM_NGRAM_BUCKETS) for text in prompts.text]
        return Examples(encoder, plain_features(prompts, None), ngrams, output_tokens)
    plain = plain_features(prompts, SentenceEncoder(encoder))
    return Examples(encoder, plain, [np.empty(0, dtype=np.int64)] * len(prompts), output_tokens)


def train_network(kind: str, given: Examples, *, num_buckets: int, seed: int) -> TextModel:
    r"""Train a network on one CPU thread: the same input gives the same weights.

    Parameters
    ----------
    kind : {"listmle", "pointwise", "buckets"}
        ``listmle`` maximises the likelihood of the true order of lists of 64 prompts under the
        Plackett-Luce model, shortest first: the loss is
        :math:`-\sum_i [z_{\pi(i)} - \log \sum_{k \ge i} e^{z_{\pi(k)}}]` with scores z of being
        short (Fu et al. 2024, whose code has lists of 32 and lengths in groups of 10 tokens; here
        lengths are exact, equal ones in random order). ``pointwise`` is least squares on
        the logarithm of the length, ``buckets`` cross-entropy over classes of equal mass.
    given : Examples
        What to learn from. A tenth is kept out to map rank scores to lengths.
    num_buckets : int
        Number of classes.
    seed : int
        Of initial weights, order and dropout.

    Notes
    -----
    The weights kept are a running average over the last few hundred steps of Adam.
    """
    rng = stream(seed, "predictor training")
    order = rng.permutation(len(given))
    num_kept_out = max(2, round(CALIBRATION_SHARE * len(given)))
    kept_out, learned = given.take(order[:num_kept_out]), given.take(order[num_kept_out:])
    arrays = _scaling(learned)
    edges = np.quantile(learned.output_tokens, np.arange(1, num_buckets) / num_buckets)
    loss = _loss(kind, learned.output_tokens, edges)
    arrays |= _fit(learned, arrays, loss, num_buckets if kind == "buckets" else 1, rng)
    if kind == "pointwise":
        # The network learns standardised logarithms; the model says logarithms.
        mean, deviation = _log_scale(learned.output_tokens)
        arrays["output"] = (arrays["output"] * deviation).astype(np.float32)
        arrays["output_bias"] = (arrays["output_bias"] * deviation + mean).astype(np.float32)
    if kind == "buckets":
        middles = (np.arange(num_buckets) + 0.5) / num_buckets
        arrays["bucket_tokens"] = np.quantile(learned.output_tokens, middles)
    if kind == "listmle":
        places = np.linspace(0.0, 1.0, NUM_QUANTILES)
        scores = _outputs(arrays, kept_out)[:, 0].astype(np.float64)
        arrays["score_quantiles"] = np.quantile(scores, places)
        arrays["length_quantiles"] = np.quantile(kept_out.output_tokens, places)
    return TextModel(kind, given.encoder, arrays)


def _scaling(learned: Examples) -> Arrays:
    arrays: Arrays = {
        "mean": learned.plain.mean(axis=0),
        "deviation": learned.plain.std(axis=0) + np.float32(1e-6),
    }
    if learned.encoder == HASHED:
        arrays["rarity"] = rarities(learned.ngrams, NUM_NGRAM_BUCKETS)
    return arrays


def _log_scale(output_tokens: Int64) -> tuple[float, float]:
    logs = np.log(output_tokens)
    return float(logs.mean()), float(logs.std()) + 1e-6


def _outputs(arrays: Arrays, some: Examples) -> Float32:
    """Return the outputs for examples whose features are made already."""
    features = (some.plain - arrays["mean"]) / arrays["deviation"]
    if some.encoder == HASHED:
        summed = bags(some.ngrams, arrays["rarity"]).sums(arrays["embedding"])
        features = np.concatenate([summed, features], axis=1)
    hidden = np.maximum(features @ arrays["hidden"] + arrays["hidden_bias"], 0)
    outputs: Float32 = hidden @ arrays["output"] + arrays["output_bias"]
    return outputs


def _loss(
    kind: str, output_tokens: Int64, edges: npt.NDArray[np.float64]
) -> Callable[[Tensor, Int64], Tensor]:
    """Return the loss of the network's outputs for the prompts `rows`."""
    import torch

    def of_order(outputs: Tensor, rows: Int64) -> Tensor:
        lengths = torch.from_numpy(output_tokens[rows]) + torch.rand(len(rows))
        shortness = -outputs[torch.argsort(lengths), 0]
        remaining = torch.logcumsumexp(shortness.flip(0), 0).flip(0)
        return (remaining - shortness).mean()

    mean, deviation = _log_scale(output_tokens)
    logs = torch.from_numpy(((np.log(output_tokens) - mean) / deviation).astype(np.float32))
    classes = torch.from_numpy(np.searchsorted(edges, output_tokens, side="left"))
    if kind == "listmle":
        return of_order
    if kind == "pointwise":
        return lambda outputs, rows: torch.nn.functional.mse_loss(outputs[:, 0], logs[rows])
    return lambda outputs, rows: torch.nn.functional.cross_entropy(outputs, classes[rows])


def _fit(
    learned: Examples,
    scaling: Arrays,
    loss: Callable[[Tensor, Int64], Tensor],
    num_outputs: int,
    rng: np.random.Generator,
) -> Arrays:
    """Return the weights of the network after training."""
    torch = load_torch()
    nn = torch.nn
    plain = torch.from_numpy((learned.plain - scaling["mean"]) / scaling["deviation"])
    hashed = learned.encoder == HASHED
    # Only n-grams that were seen often enough have a row to learn; the others stay 0.
    known = np.flatnonzero(scaling["rarity"]) if hashed else np.empty(0, dtype=np.int64)
    packed = bags(learned.ngrams, scaling["rarity"]) if hashed else None
    width = plain.shape[1] + (EMBEDDING_WIDTH if hashed else 0)
    with _repeatable(torch, int(rng.integers(2**31))):
        parts = nn.ModuleDict(
            {
                "hidden": nn.Linear(width, HIDDEN_UNITS),
                "output": nn.Linear(HIDDEN_UNITS, num_outputs),
            }
        )
        if packed is not None:
            rows_learned = nn.EmbeddingBag(
                max(len(known), 1), EMBEDDING_WIDTH, mode="sum", include_last_offset=True
            )
            nn.init.normal_(rows_learned.weight, std=0.05)
            parts["embedding"] = rows_learned

        def outputs(rows: Int64) -> Tensor:
            features = plain[rows]
            if packed is not None:
                some = packed.take(rows)
                row = torch.from_numpy(np.searchsorted(known, some.bucket))
                weight, offset = torch.from_numpy(some.weight), torch.from_numpy(some.offset)
                weight = nn.functional.dropout(weight, NGRAM_DROPOUT)
                summed = parts["embedding"](row, offset, per_sample_weights=weight)
                features = torch.cat([nn.functional.dropout(summed, DROPOUT), features], dim=1)
            hidden = nn.functional.dropout(torch.relu(parts["hidden"](features)), DROPOUT)
            return parts["output"](hidden)

        parameters = dict(parts.named_parameters())
        average = {name: value.detach().clone() for name, value in parameters.items()}
        optimizer = torch.optim.AdamW(parts.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        for step, rows in enumerate(_lists(len(learned), rng)):
            optimizer.zero_grad()
            loss(outputs(rows), rows).backward()
            optimizer.step()
            with torch.no_grad():
                for name, value in parameters.items():
                    average[name].lerp_(value, max(1 / AVERAGED_STEPS, 10 / (step + 11)))
    arrays = {name: value.numpy() for name, value in average.items()}
    weights = {
        "hidden": arrays["hidden.weight"].T,
        "hidden_bias": arrays["hidden.bias"],
        "output": arrays["output.weight"].T,
        "output_bias": arrays["output.bias"],
    }
    if hashed:
        table = np.zeros((NUM_NGRAM_BUCKETS, EMBEDDING_WIDTH), dtype=np.float32)
        table[known] = arrays["embedding.weight"][: len(known)]
        weights["embedding"] = table
    return {name: np.ascontiguousarray(value) for name, value in weights.items()}


def _lists(num_examples: int, rng: np.random.Generator) -> Iterator[Int64]:
    """Yield the rows of each step: every example once in an epoch."""
    lists_an_epoch = max(1, num_examples // LIST_SIZE)
    num_epochs = max(NUM_EPOCHS, -(-LEAST_STEPS // lists_an_epoch))
    for _ in range(num_epochs):
        yield from np.array_split(rng.permutation(num_examples), lists_an_epoch)


def load_torch() -> Any:  # noqa: ANN401 - the module
    """Import torch, or say how to get it.

    Raises
    ------
    SpecError
        If it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise SpecError(
            "training this kind needs torch: pip install 'schedlab[predictors]'"
        ) from error
    return torch


@contextmanager
def _repeatable(torch: Any, seed: int) -> Iterator[None]:  # noqa: ANN401 - the module
    """Compute on one thread, by repeatable algorithms, with random numbers of our own."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(strict)
