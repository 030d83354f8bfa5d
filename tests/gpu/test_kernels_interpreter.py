"""The Triton kernels, interpreted on the CPU, against float64 and the portable kernels.

The interpreter gets bfloat16 dot products wrong, so that format is left to the GPU tests.
"""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

if not triton.knobs.runtime.interpret:
    pytest.skip("triton is not in interpreter mode here", allow_module_level=True)

import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def _loop_kernel(count):
    for _ in range(0, tl.load(count)):
        pass


try:
    _loop_kernel[(1,)](torch.ones(1, dtype=torch.int32))
except triton.runtime.errors.InterpreterError as error:
    # Triton 3.6 relies on a conversion that numpy 2.4 took away.
    versions = f"triton {triton.__version__} with numpy {np.__version__}"
    pytest.skip(f"{versions} cannot interpret a loop: {error}", allow_module_level=True)

from schedlab.gpu_backend import cpu_ops, triton_ops  # noqa: E402
from schedlab.gpu_backend.kernel_cases import attention_case, decode_rows, rope_case  # noqa: E402
from schedlab.gpu_backend.kernels import prefill  # noqa: E402
from schedlab.gpu_backend.kernels.launch import INTERPRETER  # noqa: E402
from schedlab.gpu_backend.kernels.paging import token_offsets  # noqa: E402
from schedlab.gpu_backend.kernels.tiles import DecodeTile, PrefillTile  # noqa: E402
from schedlab.gpu_backend.reference import worst_row_error  # noqa: E402

FP32, FP16 = torch.float32, torch.float16
# fp32: rounding of sums; fp16: half a unit in the last place of inputs and outputs is 2**-11.
TOLERANCE = {FP32: 2e-6, FP16: 1e-3}

SMALL_DECODE = DecodeTile(block_n=16, min_tiles=1, programs_per_sm=4, num_warps=4, num_stages=2)
SMALL_PREFILL = PrefillTile(block_m=16, block_n=16, num_warps=4, num_stages=2)


@pytest.fixture(autouse=True)
def _poison_allocations():
    """Fill what torch.empty returns with NaN, so that nothing unwritten goes unnoticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


SHAPES = [
    # head_dim, group, block_size; a kernel's tiles go by all three and the format, its addresses by
    # the three alone: so both formats at one shape, and one of them at each other.
    (64, 4, 16, FP32),
    (64, 4, 16, FP16),
    (64, 1, 16, FP32),
    (128, 4, 16, FP16),
    (128, 8, 32, FP32),
    (64, 7, 16, FP16),
    (64, 3, 1, FP32),
    (64, 2, 3, FP16),
    (32, 16, 64, FP32),
    (16, 20, 8, FP16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "group", "block_size", "dtype"), SHAPES)
def test_decode_of_ragged_contexts_equals_reference(head_dim, group, block_size, dtype):
    # One token; exactly a block; one more; over a tile; ragged.
    rows = decode_rows(1, block_size, block_size + 1, 65, 37)
    case = attention_case(
        rows, head_dim=head_dim, group=group, block_size=block_size, dtype=dtype, num_kv_heads=1
    )
    assert worst_row_error(case.decode(triton_ops), case.expected()) < TOLERANCE[dtype]


@pytest.mark.slow
def test_decode_in_many_splits_equals_reference_and_portable_kernel():
    # 20 splits of the long row are more than the reduction takes at once; one row is not split.
    case = attention_case(decode_rows(313, 1, 70), group=2, num_kv_heads=1)
    case.decode(triton_ops, tile=SMALL_DECODE._replace(programs_per_sm=40))
    assert worst_row_error(case.out, case.expected()) < TOLERANCE[FP32]
    other = torch.full_like(case.out, float("nan"))
    cpu_ops.paged_decode(
        case.q, case.k_pool, case.v_pool, case.block_tables, case.context_lens, case.scale, other
    )
    assert worst_row_error(case.out, other.double()) < 2 * TOLERANCE[FP32]


@pytest.mark.slow
@pytest.mark.parametrize("programs_per_sm", [1, 3, 30])
def test_decode_result_does_not_depend_on_the_number_of_splits(programs_per_sm):
    case = attention_case(decode_rows(5, 200, 16, 17), group=1, num_kv_heads=1)
    case.decode(triton_ops, tile=SMALL_DECODE._replace(programs_per_sm=programs_per_sm))
    assert worst_row_error(case.out, case.expected()) < TOLERANCE[FP32]


@pytest.mark.slow
def test_decode_grid_holds_every_split_and_few_more():
    from schedlab.gpu_backend.kernels.decode import decode_launches

    case = attention_case(decode_rows(5, 200, 16, 17), num_kv_heads=2)
    decode, reduce = decode_launches(
        INTERPRETER, case.q, case.k_pool, case.v_pool, case.block_tables, case.context_lens,
        case.scale, case.out, SMALL_DECODE,
    )  # fmt: skip
    # 2 multiprocessors x 4 programs over 2 heads: 4 splits aimed at, 1 more a row by rounding.
    assert decode.grid == (2, 4 + 4)
    assert reduce.grid == (8, 4)


@pytest.mark.slow
def test_decode_padding_rows_read_the_dummy_block_and_disturb_nobody():
    case = attention_case(decode_rows(40, 1, 1), num_kv_heads=1)
    case.block_tables[1:] = 0
    case.k_pool[0] = case.v_pool[0] = 0.0
    case.decode(triton_ops, tile=SMALL_DECODE)
    assert worst_row_error(case.out[:1], case.expected()[:1]) < TOLERANCE[FP32]
    assert (case.out[1:] == 0).all()


@pytest.mark.slow
def test_decode_row_without_context_gets_zeros():
    case = attention_case(decode_rows(20, 33), num_kv_heads=1)
    expected = case.expected()
    case.context_lens[0] = 0
    case.decode(triton_ops, tile=SMALL_DECODE)
    assert (case.out[0] == 0).all()
    assert worst_row_error(case.out[1], expected[1]) < TOLERANCE[FP32]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "group", "block_size", "dtype"), SHAPES)
def test_prefill_of_mixed_batch_equals_reference(head_dim, group, block_size, dtype):
    # A whole prompt, a decode, a chunk behind a context, the first token, a short tail.
    rows = [(70, 70), (1, 50), (37, 90), (1, 1), (3, 2 * block_size + 3)]
    case = attention_case(
        rows, head_dim=head_dim, group=group, block_size=block_size, dtype=dtype, num_kv_heads=1
    )
    assert worst_row_error(case.prefill(triton_ops), case.expected()) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 4, 16])
def test_prefill_in_small_tiles_equals_reference_and_portable_kernel(group):
    rows = [(40, 40), (1, 33), (0, 5), (17, 64), (16, 16)]
    case = attention_case(rows, group=group, num_kv_heads=1)
    if group == 16:
        case = attention_case([*rows[1:3], (5, 30)], group=group, num_kv_heads=1)
    case.prefill(triton_ops, tile=SMALL_PREFILL)
    assert worst_row_error(case.out, case.expected()) < TOLERANCE[FP32]
    if group != 16:
        expected = case.out.double()
        case.out = torch.full_like(case.out, float("nan"))
        assert worst_row_error(case.prefill(cpu_ops), expected) < 2 * TOLERANCE[FP32]


@pytest.mark.slow
def test_prefill_finds_its_sequence_among_more_than_one_search_takes(monkeypatch):
    monkeypatch.setattr(prefill, "_SEARCH_WIDTH", 2)
    rows = [(1, 9), (5, 5), (1, 30), (2, 12), (7, 8)]
    case = attention_case(rows, num_kv_heads=1)
    case.prefill(triton_ops, tile=SMALL_PREFILL)
    assert worst_row_error(case.out, case.expected()) < TOLERANCE[FP32]


@pytest.mark.slow
def test_prefill_in_chunks_equals_prefill_of_the_whole():
    whole = attention_case([(50, 50)], num_kv_heads=1)
    whole.prefill(triton_ops)
    chunked = attention_case([(50, 50)], num_kv_heads=1)
    for first, end in ((0, 13), (13, 32), (32, 50)):
        triton_ops.paged_prefill(
            chunked.q[first:end], chunked.k_pool, chunked.v_pool, chunked.block_tables,
            torch.tensor([0, end - first], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32), end - first, chunked.scale,
            chunked.out[first:end],
        )  # fmt: skip
    assert worst_row_error(chunked.out, whole.out.double()) < TOLERANCE[FP32]


@pytest.mark.slow
def test_prefill_of_single_tokens_equals_decode():
    case = attention_case(decode_rows(5, 40, 16), num_kv_heads=1)
    decoded = case.decode(triton_ops).clone()
    case.out.fill_(float("nan"))
    assert worst_row_error(case.prefill(triton_ops), decoded.double()) < TOLERANCE[FP32]


@triton.jit
def _offsets_kernel(table, out, stride_block: tl.int64, N: tl.constexpr):  # noqa: N803
    positions = tl.arange(0, N)
    offsets = token_offsets(table, positions, positions < N, 1, stride_block, 16, 128)
    tl.store(out + positions, offsets)


def test_token_offsets_beyond_31_bits_are_exact():
    # 40,000 blocks of 8 heads x 16 tokens x 128 numbers are 655 M elements; ids of a shared pool
    # for 32 layers reach 32 times that.
    table = torch.tensor([1_279_999, 131_072], dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int64)
    stride = 8 * 16 * 128
    _offsets_kernel[(1,)](table, out, stride, N=32)
    inside = (16 + torch.arange(16)) * 128
    expected = torch.cat([1_279_999 * stride + inside, 131_072 * stride + inside])
    assert torch.equal(out, expected)
    assert int(out.min()) >= 2**31


def test_rope_rotates_in_place_and_writes_only_the_given_slots():
    slots = [35, -1, 0, 16, 17]
    case = rope_case(slots)
    q, k, v = (x.clone() for x in (case.q, case.k, case.v))
    case.run(triton_ops)
    expected_k = case.rotated(k)
    assert worst_row_error(case.q, case.rotated(q)) < TOLERANCE[FP32]
    assert worst_row_error(case.k, expected_k) < TOLERANCE[FP32]
    assert torch.equal(case.v, v)
    for pool, written in ((case.k_pool, case.k), (case.v_pool, v)):
        cells = pool.transpose(1, 2).flatten(0, 1)
        for token, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(cells[slot], written[token])
                cells[slot] = float("nan")
        assert cells.isnan().all()


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (7, 1), (8, 2), (12, 12)])
def test_rope_equals_the_portable_kernel(num_heads, num_kv_heads, dtype):
    cases = [
        rope_case([5, 40, -1], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
        for _ in range(2)
    ]
    cases[0].run(triton_ops)
    cases[1].run(cpu_ops)
    for name in ("q", "k", "v", "k_pool", "v_pool"):
        got, expected = (getattr(case, name) for case in cases)
        assert torch.allclose(got, expected, rtol=TOLERANCE[dtype], atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("hidden", [64, 896, 1000])
@pytest.mark.parametrize("with_residual", [True, False])
def test_add_rms_norm_equals_float64_and_the_portable_kernel(hidden, dtype, with_residual):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, hidden, generator=generator).to(dtype) for _ in "xr")
    weight = torch.randn(hidden, generator=generator).to(dtype)
    given = residual if with_residual else None
    normed, total = triton_ops.add_rms_norm(x, given, weight, 1e-5)
    sum64 = (x + residual if with_residual else x).double()
    scale = (sum64.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt()
    assert torch.equal(total.double(), sum64)
    assert worst_row_error(normed, sum64 * scale * weight.double()) < TOLERANCE[dtype]
    portable, _ = cpu_ops.add_rms_norm(x, given, weight, 1e-5)
    assert worst_row_error(normed, portable.double()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("width", [64, 1024, 1400])
def test_silu_and_mul_equals_float64_and_the_portable_kernel(width, dtype):
    gate_up = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype) * 4
    got = triton_ops.silu_and_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert worst_row_error(got, gate * gate.sigmoid() * up) < TOLERANCE[dtype]
    assert worst_row_error(got, cpu_ops.silu_and_mul(gate_up).double()) < 2 * TOLERANCE[dtype]


def test_attention_over_pools_of_different_layout_is_refused():
    case = attention_case(decode_rows(5, 40), num_kv_heads=2)
    case.v_pool = case.v_pool.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="strides"):
        case.decode(triton_ops)
