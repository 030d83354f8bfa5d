"""Choose the next tokens: greedily, or at random from a stream of each request's own."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def sample(logits: Tensor, keys: Tensor, temperature: float = 0.0) -> Tensor:
    """Return the next token of every row.

    Parameters
    ----------
    logits : Tensor, shape (R, vocab_size)
    keys : Tensor of int64, shape (R,)
        What a row's randomness depends on, and nothing else: not the batch, not the step.
        Not looked at with temperature 0.
    temperature : float
        0 takes the largest logit (the lowest token of several).

    Returns
    -------
    Tensor of int64, shape (R,)

    Notes
    -----
    Gumbel-max: ``argmax(logits / temperature + g)`` with ``g = -log(-log(u))`` draws from the
    softmax (Gumbel 1954). u of row and token is a hash of key and token (the finaliser of
    SplitMix64), the same on every device.
    """
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    tokens = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int64)
    bits = _mix(_mix(keys)[:, None] + tokens * _signed(0x9E3779B97F4A7C15))
    # 23 bits and a half: exact in float32, and never 0 or 1, whose logarithms are infinite.
    uniform = ((bits >> 41) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return (logits.float() / temperature - (-uniform.log()).log()).argmax(dim=-1)


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 values (wrapping), so that near ones become unrelated."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> bits) & (_MASK >> bits)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
