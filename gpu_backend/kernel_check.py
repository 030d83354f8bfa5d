"""Correctness of the kernels on the device they run on, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from schedlab.gpu_backend import triton_ops
from schedlab.gpu_backend.device import free_bytes
from schedlab.gpu_backend.kernel_cases import attention_case, decode_rows, rope_case
from schedlab.gpu_backend.kernels.launch import device_of
from schedlab.gpu_backend.kernels.tiles import decode_tile
from schedlab.gpu_backend.reference import worst_row_error

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative error of a token: about two units in the last place of the format."""

_SHAPES = ((64, 4, 16), (128, 1, 16), (128, 4, 16), (128, 7, 32), (128, 8, 16))
"""Head dimension, query heads a KV head, block size."""


class Check(NamedTuple):
    """One comparison with the reference."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


def kernel_checks(
    device: torch.device,
    dtype: torch.dtype,
    num_shapes: int = len(_SHAPES),
    large_batches: tuple[int, ...] = (130, 256),
) -> Iterator[tuple[str, Callable[[], Iterable[Check]]]]:
    """Yield the checks of every kernel on small but awkward inputs, by name, to be run one by one.

    Parameters
    ----------
    device : torch.device
        A GPU, or the CPU under Triton's interpreter.
    dtype : torch.dtype
        float16 or bfloat16 (the interpreter gets bfloat16 wrong).
    num_shapes : int
        Shapes of attention to check, fewer to rehearse.
    large_batches : tuple of int
        Rows of decode batches beyond 128, more than a program has threads to count their splits.

    Notes
    -----
    Unused cells of the pools and all outputs are NaN beforehand, so that a wrong address or an
    output that is not written fails rather than passes by luck.
    """
    for shape in _SHAPES[:num_shapes]:
        title = "attention D={} G={} block={}".format(*shape)
        yield title, partial(_check_attention, device, dtype, *shape)
    yield "decode of large batches", partial(_check_large_batches, device, dtype, large_batches)
    yield "rope_and_cache", lambda: [_check_rope(device, dtype)]
    yield "elementwise", partial(_check_elementwise, device, dtype)


def _check_attention(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int, block_size: int
) -> Iterator[Check]:
    tolerance = TOLERANCES[dtype]
    shape = f"D={head_dim} G={group} block={block_size}"
    decode = attention_case(
        decode_rows(1, block_size, block_size + 1, 300, 65),
        head_dim=head_dim, group=group, block_size=block_size, num_kv_heads=2, dtype=dtype,
        device=device,
    )  # fmt: skip
    expected = decode.expected()
    error = worst_row_error(decode.decode(triton_ops), expected)
    yield Check(f"paged_decode {shape}", error, tolerance)
    tile = decode_tile(device_of(decode.q), head_dim, dtype)._replace(min_tiles=1)
    decode.out.fill_(float("nan"))
    error = worst_row_error(decode.decode(triton_ops, tile=tile), expected)
    yield Check(f"paged_decode {shape}, split finely", error, tolerance)
    mixed = attention_case(
        [(150, 150), (1, 90), (37, 200), (0, 5), (1, 1)],
        head_dim=head_dim, group=group, block_size=block_size, num_kv_heads=2, dtype=dtype,
        device=device,
    )  # fmt: skip
    error = worst_row_error(mixed.prefill(triton_ops), mixed.expected())
    yield Check(f"paged_prefill {shape}, mixed batch", error, tolerance)


def _check_large_batches(
    device: torch.device, dtype: torch.dtype, batches: tuple[int, ...]
) -> Iterator[Check]:
    for batch in batches:
        case = attention_case(
            decode_rows(*(1 + 7 * i % 90 for i in range(batch))),
            head_dim=64, group=1, num_kv_heads=1, dtype=dtype, device=device,
        )  # fmt: skip
        error = worst_row_error(case.decode(triton_ops), case.expected())
        yield Check(f"paged_decode of {batch} rows", error, TOLERANCES[dtype])


def check_repeatable(
    device: torch.device,
    dtype: torch.dtype,
    *,
    repetitions: int = 50,
    prompt_tokens: int = 4096,
    decode_contexts: tuple[int, ...] = (4096, *range(500, 2900, 40)),
) -> Iterator[Check]:
    """Run attention again and again on one input: equal to the bit, or there is a race.

    The kernels add in a fixed order and use no atomics, so a bit that moves is a read that came
    before its write: an asynchronous copy or product that nobody waited for.

    Parameters
    ----------
    device : torch.device
    dtype : torch.dtype
    repetitions : int
        Runs of each kernel.
    prompt_tokens : int
        Of a prefill, long enough to fill the device.
    decode_contexts : tuple of int
        Of a decode batch.

    Yields
    ------
    Check
        Its error is the share of runs that differ from the first; none may.
    """
    prefill = attention_case(
        [(prompt_tokens, prompt_tokens)], head_dim=128, dtype=dtype, device=device
    )
    decode = attention_case(decode_rows(*decode_contexts), head_dim=128, dtype=dtype, device=device)
    for name, run, out in (
        ("paged_prefill", lambda: prefill.prefill(triton_ops), prefill.out),
        ("paged_decode", lambda: decode.decode(triton_ops), decode.out),
    ):
        share = _share_of_different(run, out, repetitions)
        yield Check(f"{name} {repetitions} times, bits that move", share, 0.0)


def _share_of_different(run: Callable[[], Tensor], out: Tensor, repetitions: int) -> float:
    """Return which share of runs does not give the bits of the first; NaN is never equal."""
    first = run().clone()
    different = 0
    for _ in range(repetitions - 1):
        out.fill_(float("nan"))
        different += not torch.equal(run(), first)
    return different / max(1, repetitions - 1)


def check_high_block_ids(device: torch.device, dtype: torch.dtype) -> Check:
    """Attend to, and write, blocks that lie more than 2**31 elements into a pool.

    Needs 9 GB of device memory.

    Raises
    ------
    MemoryError
        If there is less.
    """
    num_kv_heads, block_size, head_dim = 8, 16, 128
    num_blocks = 2**31 // (num_kv_heads * block_size * head_dim) + 64
    needed = 2 * num_blocks * num_kv_heads * block_size * head_dim * dtype.itemsize
    if free_bytes(device) < 1.1 * needed:
        raise MemoryError(f"pools of {needed / 1e9:.1f} GB do not fit into the device's memory")
    small = attention_case(
        decode_rows(100, 250), head_dim=head_dim, num_kv_heads=num_kv_heads,
        block_size=block_size, dtype=dtype, device=device,
    )  # fmt: skip
    expected = small.expected()
    count = small.k_pool.shape[0]
    shift = num_blocks - count
    for name in ("k_pool", "v_pool"):
        pool = torch.empty(
            (num_blocks, num_kv_heads, block_size, head_dim), dtype=dtype, device=device
        )
        pool[shift:] = getattr(small, name)
        setattr(small, name, pool)
    small.block_tables += shift
    decode_error = worst_row_error(small.decode(triton_ops), expected)
    small.out.fill_(float("nan"))
    prefill_error = worst_row_error(small.prefill(triton_ops), expected)
    rope = rope_case([3], num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    rope.k_pool, rope.v_pool = small.k_pool, small.v_pool
    rope.slots += (num_blocks - 1) * block_size
    rope.run(triton_ops)
    write_error = worst_row_error(rope.v_pool[-1, :, 3], rope.v[0].double())
    error = _worst([decode_error, prefill_error, write_error])
    return Check(f"block ids up to {num_blocks}", error, TOLERANCES[dtype])


def _check_rope(device: torch.device, dtype: torch.dtype) -> Check:
    case = rope_case([35, -1, 0, 16, 17], head_dim=128, dtype=dtype, device=device)
    expected_q, expected_k = case.rotated(case.q), case.rotated(case.k)
    case.run(triton_ops)
    errors = [worst_row_error(case.q, expected_q), worst_row_error(case.k, expected_k)]
    for pool, source in ((case.k_pool, expected_k), (case.v_pool, case.v.double())):
        cells = pool.transpose(1, 2).flatten(0, 1)
        written = case.slots >= 0
        errors.append(worst_row_error(cells[case.slots[written]], source[written]))
        untouched = cells.isnan().flatten(1).all(dim=1)
        if int(untouched.sum()) != len(cells) - int(written.sum()):
            errors.append(float("inf"))
    return Check("rope_and_cache", _worst(errors), TOLERANCES[dtype])


def _check_elementwise(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(9, 4096, generator=generator).to(device, dtype) for _ in "xr")
    weight = torch.randn(4096, generator=generator).to(device, dtype)
    normed, total = triton_ops.add_rms_norm(x, residual, weight, 1e-5)
    wide = (x + residual).double()
    expected = wide * (wide.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    error = _worst([worst_row_error(normed, expected), worst_row_error(total, wide)])
    yield Check("add_rms_norm", error, TOLERANCES[dtype])
    gate_up = 4 * torch.randn(9, 2 * 1400, generator=generator).to(device, dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    error = worst_row_error(triton_ops.silu_and_mul(gate_up), gate * gate.sigmoid() * up)
    yield Check("silu_and_mul", error, TOLERANCES[dtype])


def _worst(errors: list[float]) -> float:
    """Return the largest error; unlike `max`, NaN if any is."""
    return float(torch.tensor(errors, dtype=torch.float64).max())
