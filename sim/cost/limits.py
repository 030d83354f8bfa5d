"""No step may be faster than the device: arithmetic and memory traffic bound it from below."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.dtypes import stored_bytes
from schedlab.sim.record.columns import Columns, whole_numbers

TOLERANCE = 1.25
"""Devices run above the clock their datasheet's peak is quoted for, and caches hold some weights
between steps; what is so much faster than the datasheet allows is a wrong unit or model."""


def least_step_s(
    steps: Columns,
    deployment: Deployment,
) -> npt.NDArray[np.float64]:
    """Return how long each step takes at least on this device.

    Parameters
    ----------
    steps : mapping of str to ndarray, shape (num_steps,)
        num_decodes, prefill_tokens, decode_context_sum_tokens.
    deployment : Deployment
        What runs where.

    Returns
    -------
    ndarray of float64, shape (num_steps,)
        Seconds.

    Notes
    -----
    ``max(2 * weights touched per token * tokens / peak, (weights + KV read) / bandwidth)`` over the
    devices; no attention arithmetic, no activations, no head, so the bound is a loose one. Of a
    mixture of experts a step reads at least the experts of one token, or its share of them where
    engines share experts.
    """
    model, gpu, dtype = deployment.model, deployment.gpu, deployment.dtype
    experts = model.num_moe_layers * model.experts_per_token / deployment.data_parallel_size
    per_token = model.matrix_parameters(0) + experts * model.expert_parameters
    tokens = whole_numbers(steps, "num_decodes") + whole_numbers(steps, "prefill_tokens")
    flops_s = 2.0 * per_token * tokens / gpu.peak_flops_per_s(dtype)
    kv_bytes = model.kv_bytes_per_token(deployment.kv_dtype, 1)
    weight_bytes = per_token * stored_bytes(deployment.stored_dtype)
    moved = weight_bytes + kv_bytes * whole_numbers(steps, "decode_context_sum_tokens")
    bytes_s = moved / gpu.memory_bytes_per_s
    least: npt.NDArray[np.float64] = np.maximum(flops_s, bytes_s) / deployment.tensor_parallel_size
    return np.where(tokens > 0, least, 0.0)


def check_limits(
    steps: Columns,
    deployment: Deployment,
    source: str,
) -> None:
    """Refuse step times that the device cannot reach.

    Parameters
    ----------
    steps : mapping of str to ndarray, shape (num_steps,)
        As for `least_step_s`, with start_ns and end_ns.
    deployment : Deployment
        What runs where.
    source : str
        The cost model, for the message.

    Raises
    ------
    SpecError
        If a step is more than `TOLERANCE` times faster than that.
    """
    took_s = (whole_numbers(steps, "end_ns") - whole_numbers(steps, "start_ns")) / 1e9
    least_s = least_step_s(steps, deployment)
    bad = np.flatnonzero(took_s * TOLERANCE < least_s)
    if len(bad):
        i = int(bad[np.argmax(least_s[bad] / np.maximum(took_s[bad], 1e-12))])
        raise SpecError(
            f"cost model {source}: a step of {steps['num_decodes'][i]} decodes and "
            f"{steps['prefill_tokens'][i]} prompt tokens takes {took_s[i] * 1e3:.3f} ms, but "
            f"{deployment.model.name} needs at least {least_s[i] * 1e3:.3f} ms on "
            f"{deployment.gpu.name} (its peak FLOP/s and bytes/s); {len(bad)} steps are beyond the "
            "device"
        )
