"""Named random streams: one seed, one independent generator per purpose."""

import zlib

import numpy as np
import numpy.typing as npt


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


def uniforms(seed: int, name: str, *counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) that depend on the seed, the name and the counters alone.

    Parameters
    ----------
    seed : int
        Non-negative seed of the experiment.
    name : str
        What the numbers are for.
    *counters : ndarray of int64, shape (n,)
        What tells one number from another, e.g. session and call: whoever draws others, or draws
        them in another order, gets the same.

    Returns
    -------
    ndarray of float64, shape (n,)

    Notes
    -----
    The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) over the counters in turn.

    Examples
    --------
    >>> few, more = np.arange(2), np.arange(9)
    >>> bool((uniforms(1, "think", more)[:2] == uniforms(1, "think", few)).all())
    True
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    start = (seed * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode())) & 0xFFFFFFFFFFFFFFFF
    state = np.full(len(counters[0]), start, dtype=np.uint64)
    for counter in counters:
        state += counter.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state += np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
