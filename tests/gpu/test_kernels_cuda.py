"""The Triton kernels on a real GPU, in the formats the interpreter cannot be trusted with."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from schedlab.gpu_backend import kernel_check, triton_ops  # noqa: E402
from schedlab.gpu_backend.kernel_cases import attention_case, decode_rows  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_kernels_on_the_gpu_equal_the_reference(dtype):
    groups = kernel_check.kernel_checks(torch.device("cuda"), dtype)
    checks = [check for _, run in groups for check in run()]
    assert checks
    assert [c for c in checks if not c.passed] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_attention_on_the_gpu_gives_the_same_bits_every_time(dtype):
    checks = list(kernel_check.check_repeatable(torch.device("cuda"), dtype))
    assert [c for c in checks if not c.passed] == []


def test_blocks_beyond_31_bit_offsets_are_read_and_written():
    try:
        check = kernel_check.check_high_block_ids(torch.device("cuda"), torch.bfloat16)
    except MemoryError as error:
        pytest.skip(str(error))
    assert check.passed, check


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_decode_in_a_graph_gives_the_same_bits_as_eagerly(dtype):
    case = attention_case(decode_rows(700, 3, 90), head_dim=128, dtype=dtype, device="cuda")
    eager = case.decode(triton_ops).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.decode(triton_ops)
    case.out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(case.out, eager)


def test_decode_in_a_graph_follows_the_contexts_it_is_given_later():
    # The split is decided on the device: a graph captured for short rows serves long ones.
    case = attention_case(
        decode_rows(2000, 1500, 1), head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    longest = case.context_lens.clone()
    expected = case.expected()
    case.context_lens.fill_(1)
    case.decode(triton_ops)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.decode(triton_ops)
    case.context_lens.copy_(longest)
    case.out.fill_(float("nan"))
    graph.replay()
    error = kernel_check.worst_row_error(case.out, expected)
    assert error <= kernel_check.TOLERANCES[torch.bfloat16]
