"""The fluid equilibrium of a server with stage-wise batches."""

from collections.abc import Sequence
from typing import NamedTuple

from schedlab.sim.sums import in_order


class FluidEquilibrium(NamedTuple):
    """The steady state in which every iteration admits what arrives during it."""

    step_s: float
    admitted: tuple[float, ...]
    """Requests of each type that one iteration admits, and that stand at each stage."""
    memory_tokens: float
    num_running: float


def fluid_equilibrium(
    request_rates: Sequence[float],
    prompt_tokens: Sequence[float],
    output_tokens: Sequence[float],
    step_base_s: float,
    step_s_per_token: float,
) -> FluidEquilibrium:
    r"""Compute the equilibrium of a server whose step takes :math:`d_0 + d_1 M` seconds.

    With :math:`n_j = \lambda_j \Delta T` requests of type j at each of its :math:`l'_j + 1`
    stages, memory holds :math:`M = \sum_j n_j (l'_j + 1)(l_j + l'_j / 2)` tokens, so
    :math:`\Delta T = d_0 / (1 - d_1 \sum_j \lambda_j (l'_j + 1)(l_j + l'_j / 2))`.

    Source: Ao, Luo, Simchi-Levi, Wang (arXiv:2504.11320), the fluid model behind WAIT.

    Parameters
    ----------
    request_rates : sequence of float
        Arrivals of each type per second.
    prompt_tokens, output_tokens : sequence of float
        Lengths of each type.
    step_base_s, step_s_per_token : float
        Time of a step: a constant, and per token in memory.

    Raises
    ------
    ValueError
        If the load has no equilibrium (the denominator is not positive).
    """
    per_second = in_order(
        rate * (out + 1.0) * (prompt + out / 2.0)
        for rate, prompt, out in zip(request_rates, prompt_tokens, output_tokens, strict=True)
    )
    if step_s_per_token * per_second >= 1.0:
        raise ValueError(
            f"no equilibrium: {per_second:.4g} tokens in memory per second of step time, at "
            f"{step_s_per_token:.3g} s a token, take more time than there is"
        )
    step_s = step_base_s / (1.0 - step_s_per_token * per_second)
    admitted = tuple(rate * step_s for rate in request_rates)
    running = sum(n * (out + 1.0) for n, out in zip(admitted, output_tokens, strict=True))
    return FluidEquilibrium(step_s, admitted, step_s * per_second, running)
