"""The keys of a sweep: one key with its values, or several linked ones that move together."""

from __future__ import annotations

from typing import Any


def swept_keys(key: str) -> tuple[str, ...]:
    """Return the keys that an entry of a sweep sets.

    Parameters
    ----------
    key : str
        A dotted key, or several separated by commas.

    Returns
    -------
    tuple of str
        In the order given.

    Examples
    --------
    >>> swept_keys("engine.max_num_seqs, engine.max_num_batched_tokens")
    ('engine.max_num_seqs', 'engine.max_num_batched_tokens')
    """
    return tuple(part.strip() for part in key.split(","))


def swept_values(key: str, item: Any) -> tuple[Any, ...]:  # noqa: ANN401 - whatever YAML holds
    """Return the value of each key of an entry, for one item of its list.

    Parameters
    ----------
    key : str
        As for `swept_keys`.
    item : Any
        A value, or for linked keys a list with one value a key.

    Returns
    -------
    tuple
        As many as there are keys.

    Raises
    ------
    ValueError
        If linked keys do not get a list with one value each.

    Examples
    --------
    >>> swept_values("a, b", [64, 1024])
    (64, 1024)
    """
    keys = swept_keys(key)
    if len(keys) == 1:
        return (item,)
    if not isinstance(item, list) or len(item) != len(keys):
        raise ValueError(f"must be a list with a value for each of {', '.join(keys)}, got {item!r}")
    return tuple(item)
