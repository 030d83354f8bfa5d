"""Models of output length that are small enough to know what they say."""

import numpy as np

from schedlab.experiments.training.train import write_model


def chars_plus_one(folder, *, latency_s=0.002, **meta):
    """Write a model that predicts one token a character of the prompt, and one more."""
    hidden = np.zeros((11, 1), dtype=np.float32)
    hidden[2] = 1.0  # two columns of embeddings, then log(1 + characters)
    arrays = {
        "mean": np.zeros(9, dtype=np.float32),
        "deviation": np.ones(9, dtype=np.float32),
        "rarity": np.zeros(8),
        "embedding": np.zeros((8, 2), dtype=np.float32),
        "hidden": hidden,
        "hidden_bias": np.zeros(1, dtype=np.float32),
        "output": np.ones((1, 1), dtype=np.float32),
        "output_bias": np.zeros(1, dtype=np.float32),
    }
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"kind": "pointwise", "encoder": "hashed", "seed": 0, **meta}
    write_model(folder, meta, arrays, {"latency_s": {"median": latency_s}})
    return folder
