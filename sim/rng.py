"""Named random streams: one seed, one independent generator per purpose."""

import zlib

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the stream `name` under `seed`.

    Streams of different names are independent, so adding a consumer of randomness never
    shifts the numbers that another one draws.

    Parameters
    ----------
    seed : int
        Non-negative seed of the experiment.
    name : str
        What the numbers are for, e.g. ``"arrivals"`` or ``"predictor"``.

    Returns
    -------
    numpy.random.Generator
        A PCG64 generator seeded from ``(seed, crc32(name))``.

    Raises
    ------
    ValueError
        If `seed` is negative.

    Examples
    --------
    >>> float(stream(0, "arrivals").random()) == float(stream(0, "arrivals").random())
    True
    >>> float(stream(0, "arrivals").random()) == float(stream(0, "lengths").random())
    False
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
