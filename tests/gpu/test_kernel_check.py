"""Checks of kernels, with ops of which some are wrong: each check tells of its own op alone."""

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from schedlab.gpu_backend import cpu_ops, kernel_check  # noqa: E402
from schedlab.gpu_backend.kernel_cases import (  # noqa: E402
    AttentionCase,
    RopeCase,
    attention_case,
    rope_case,
)

CPU, FP16, FP32 = torch.device("cpu"), torch.float16, torch.float32


def skewed(x, row=-1):
    """Let a row of what an op has written be a two hundredth too large."""
    x[row] *= 1.005


class Ops:
    """The portable ops under the names of the kernels; some of them are wrong."""

    def __init__(self, *wrong):
        self.wrong = wrong
        self.asked = []

    def paged_decode(self, q, k_pool, *given, tile=None):
        self.asked.append((tuple(q.shape), tuple(k_pool.shape[1:]), tile and tile.min_tiles))
        cpu_ops.paged_decode(q, k_pool, *given)
        if ("decode" if tile is None else "decode in splits") in self.wrong:
            skewed(given[-1])

    def paged_prefill(self, *given):
        cpu_ops.paged_prefill(*given)
        if "prefill" in self.wrong:
            skewed(given[-1], 0)

    def rope_and_cache(self, q, k, v, cos_sin, positions, slots, k_pool, v_pool):
        cpu_ops.rope_and_cache(q, k, v, cos_sin, positions, slots, k_pool, v_pool)
        if "q" in self.wrong:
            skewed(q)
        if "k" in self.wrong:
            skewed(k)
        if "cached k" in self.wrong:
            skewed(k_pool, (0, slice(None), 0))
        if "cached v" in self.wrong:
            skewed(v_pool, (1, slice(None), 1))
        if "padding is cached" in self.wrong:
            v_pool[0, :, 7] = 1.0

    def add_rms_norm(self, *given):
        normed, total = cpu_ops.add_rms_norm(*given)
        if "normed" in self.wrong:
            skewed(normed)
        if "total" in self.wrong:
            skewed(total, 0)
        return normed, total

    def silu_and_mul(self, gate_up):
        product = cpu_ops.silu_and_mul(gate_up)
        if "product" in self.wrong:
            skewed(product, 4)
        return product


NAMES = (
    "paged_decode D=64 G=4 block=16", "paged_decode D=64 G=4 block=16, split finely",
    "paged_prefill D=64 G=4 block=16, mixed batch", "paged_decode of 3 rows",
    "paged_decode of 5 rows", "rope_and_cache", "add_rms_norm", "silu_and_mul",
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "failing"),
    [
        ((), ()), (("decode", "q", "normed"), (0, 3, 4, 5, 6)),
        (("decode in splits", "k", "total"), (1, 5, 6)), (("prefill", "cached k"), (2, 5)),
        (("product", "cached v"), (5, 7)), (("padding is cached",), (5,)),
    ],
)  # fmt: skip
def test_check_of_kernels_fails_for_the_ops_that_are_wrong(monkeypatch, wrong, failing):
    monkeypatch.setattr(kernel_check, "triton_ops", Ops(*wrong))
    titles, checks = [], []
    for title, run in kernel_check.kernel_checks(CPU, FP16, 1, (3, 5)):
        titles.append(title)
        checks += run()
    assert titles == [
        "attention D=64 G=4 block=16", "decode of large batches", "rope_and_cache", "elementwise",
    ]  # fmt: skip
    assert tuple(check.name for check in checks) == NAMES
    assert {check.tolerance for check in checks} == {1e-3}
    assert tuple(i for i, check in enumerate(checks) if not check.passed) == failing
    assert all(math.isinf(checks[i].error) == ("padding is cached" in wrong) for i in failing)


def test_case_hands_each_of_its_fields_and_the_tile_to_the_op_it_is_for():
    asked = []
    ops = SimpleNamespace(
        paged_decode=lambda *given, **more: asked.append((given, more)),
        paged_prefill=lambda *given, **more: asked.append((given, more)),
        rope_and_cache=lambda *given, **more: asked.append((given, more)),
    )
    case = AttentionCase(*"qkvtsc", 7, 0.5, "out")
    assert case.decode(ops) == case.prefill(ops) == "out"
    assert case.decode(ops, tile="small") == case.prefill(ops, tile="large") == "out"
    decode, prefill = ("q", "k", "v", "t", "c", 0.5, "out"), (*"qkvtsc", 7, 0.5, "out")
    assert asked == [
        (decode, {}), (prefill, {}), (decode, {"tile": "small"}), (prefill, {"tile": "large"}),
    ]  # fmt: skip
    asked.clear()
    RopeCase(*"qkvaplKV").run(ops)
    assert asked == [(tuple("qkvaplKV"), {})]


def test_case_of_attention_holds_each_context_in_blocks_of_its_own_and_nothing_else():
    sequences = [(3, 5), (2, 8), (6, 9)]
    case = attention_case(
        sequences, head_dim=4, group=3, num_kv_heads=2, block_size=4, dtype=FP16, seed=5
    )
    assert (case.max_query_tokens, case.scale) == (6, 0.5)
    assert (case.query_start.tolist(), case.context_lens.tolist()) == ([0, 3, 5, 11], [5, 8, 9])
    assert case.q.shape == case.out.shape == (11, 6, 4)
    assert case.q.stride() == (10 * 4, 4, 1), "a view into queries, keys and values"
    assert {t.dtype for t in (case.q, case.k_pool, case.v_pool, case.out)} == {FP16}
    assert case.out.isnan().all()
    assert case.q.isfinite().all()
    taken = [row[:n].tolist() for row, n in zip(case.block_tables, (2, 2, 3), strict=True)]
    every = [block for blocks in taken for block in blocks]
    assert len(set(every)) == 7
    assert 0 not in every
    assert max(every) < len(case.k_pool)
    rest = [row[n:].tolist() for row, n in zip(case.block_tables, (2, 2, 3), strict=True)]
    assert rest == [[2**30] * 2, [2**30] * 2, [2**30]]
    for pool in (case.k_pool, case.v_pool):
        there = pool.isfinite()
        assert (there.all(dim=(1, 3)) == there.any(dim=(1, 3))).all(), "of all heads"
        cells = there.all(dim=(1, 3))
        for blocks, (_, context) in zip(taken, sequences, strict=True):
            flat = cells[blocks].flatten().tolist()
            assert flat == [True] * context + [False] * (len(flat) - context)
        assert cells.sum() == 5 + 8 + 9
    assert not case.k_pool.equal(case.v_pool)
    again = attention_case(
        sequences, head_dim=4, group=3, num_kv_heads=2, block_size=4, dtype=FP16, seed=5
    )
    assert again.q.equal(case.q)
    assert again.block_tables.equal(case.block_tables)


class Idle(Ops):
    """Notes what it is asked, and computes nothing."""

    def paged_decode(self, q, k_pool, *given, tile=None):
        self.asked.append((tuple(q.shape), tuple(k_pool.shape[1:]), tile and tile.min_tiles))

    def paged_prefill(self, *given):
        pass


def test_check_of_kernels_goes_over_shapes_and_large_batches(monkeypatch):
    ops = Idle()
    monkeypatch.setattr(AttentionCase, "expected", lambda case: case.out)
    monkeypatch.setattr(kernel_check, "triton_ops", ops)
    every = list(kernel_check.kernel_checks(CPU, FP16))
    assert [title for title, _ in every] == [
        *(f"attention D={d} G={g} block={b}"
          for d, g, b in ((64, 4, 16), (128, 1, 16), (128, 4, 16), (128, 7, 32), (128, 8, 16))),
        "decode of large batches", "rope_and_cache", "elementwise",
    ]  # fmt: skip
    list(every[3][1]())
    assert ops.asked == [((5, 14, 128), (2, 32, 128), None), ((5, 14, 128), (2, 32, 128), 1)]
    ops.asked.clear()
    list(every[5][1]())
    assert [shape for shape, *_ in ops.asked] == [(130, 1, 64), (256, 1, 64)]
    monkeypatch.setattr(kernel_check, "_SHAPES", kernel_check._SHAPES[:1])
    groups = kernel_check.kernel_checks(CPU, FP16)
    assert [len(list(checks())) for _, checks in groups] == [3, 2, 1, 2]


class Fickle(Ops):
    """Attention of which every `th` run is wrong in a bit."""

    def __init__(self, th):
        super().__init__()
        self.th, self.runs = th, {"decode": 0, "prefill": 0}

    def _note(self, name, out):
        self.runs[name] += 1
        if self.runs[name] % self.th == 0:
            out[0, 0, 0] += 0.01

    def paged_decode(self, *given, tile=None):
        super().paged_decode(*given, tile=tile)
        self._note("decode", given[-1])

    def paged_prefill(self, *given):
        super().paged_prefill(*given)
        self._note("prefill", given[-1])


@pytest.mark.parametrize(("th", "share"), [(100, 0.0), (2, 0.5), (3, 0.25), (1, 1.0)])
def test_repeated_runs_are_held_against_the_first(monkeypatch, th, share):
    ops = Fickle(th)
    monkeypatch.setattr(kernel_check, "triton_ops", ops)
    checks = list(
        kernel_check.check_repeatable(
            CPU, FP32, repetitions=5, prompt_tokens=6, decode_contexts=(4, 9, 2)
        )
    )
    # Runs 2 to 5 are told apart from run 1; a run that adds to what it computes anew is no race.
    shares = [0.0 if th == 1 else share] * 2
    assert [(check.name, check.error, check.tolerance) for check in checks] == [
        (f"{name} 5 times, bits that move", one, 0.0)
        for name, one in zip(("paged_prefill", "paged_decode"), shares, strict=True)
    ]
    assert ops.runs == {"decode": 5, "prefill": 5}
    assert {shape for shape, *_ in ops.asked} == {(3, 8, 128)}


def test_output_that_is_not_written_again_is_no_repetition():
    out = torch.ones(2)
    assert kernel_check._share_of_different(lambda: out, out, 3) == 1.0
    assert kernel_check._share_of_different(lambda: torch.ones(2), out, 1) == 0.0


def test_high_block_ids_need_room_for_both_pools_and_a_tenth_more(monkeypatch):
    # 2**31 numbers and 64 blocks more of 8 heads, 16 tokens, 128 numbers; twice, of two bytes.
    needed = 2 * (2**31 + 64 * 8 * 16 * 128) * 2
    monkeypatch.setattr(kernel_check, "free_bytes", lambda device: int(1.1 * needed) - 1)
    with pytest.raises(MemoryError, match=r"pools of 8\.6 GB"):
        kernel_check.check_high_block_ids(CPU, FP16)

    def empty(*given, **options):
        raise LookupError(given[0])

    monkeypatch.setattr(kernel_check, "free_bytes", lambda device: int(1.1 * needed) + 1)
    monkeypatch.setattr(kernel_check, "torch", SimpleNamespace(empty=empty))
    with pytest.raises(LookupError, match=r"\(131136, 8, 16, 128\)"):
        kernel_check.check_high_block_ids(CPU, FP16)


def test_check_passes_up_to_its_tolerance_and_never_with_nan():
    errors = (0.0, 0.5, 0.50001, math.nan, math.inf)
    passed = [kernel_check.Check("a", error, 0.5).passed for error in errors]
    assert passed == [True, True, False, False, False]
    assert math.isnan(kernel_check._worst([1.0, math.nan, 2.0]))
    assert kernel_check._worst([1.0, 3.0, 2.0]) == 3.0


def test_attention_case_lays_sequences_on_blocks_of_their_own_amid_nan():
    case = attention_case([(2, 5), (1, 8), (3, 3)], group=3, num_kv_heads=2, block_size=4)
    assert case.q.shape == case.out.shape == (6, 6, 64)
    assert case.q.stride() == ((3 + 2) * 2 * 64, 64, 1), "a view into a wider projection"
    assert case.query_start.tolist() == [0, 2, 3, 6]
    assert case.context_lens.tolist() == [5, 8, 3]
    assert (case.max_query_tokens, case.scale) == (3, 0.125)
    # Two, two and one blocks; three nobody has, and block 0.
    assert case.block_tables.shape == (3, 2 + 1)
    used = [case.block_tables[row, :count].tolist() for row, count in enumerate((2, 2, 1))]
    assert len({block for row in used for block in row} | {0}) == 6
    assert (case.block_tables == 2**30).sum() == 9 - 5
    for pool in (case.k_pool, case.v_pool):
        assert pool.shape == (5 + 3 + 1, 2, 4, 64)
        there = ~pool.isnan().flatten(2).any(dim=2).any(dim=1)
        assert there.tolist() == [b == used[0][0] or b in used[1] for b in range(9)]
        tokens = (~pool.isnan()).sum(dim=(1, 2, 3)) // (2 * 64)
        assert int(tokens.sum()) == 5 + 8 + 3
        assert tokens[used[0][1]] == 1
        assert tokens[used[2][0]] == 3
    assert case.out.isnan().all()


def test_rope_case_turns_by_angles_and_has_a_block_beyond_the_last_slot():
    case = rope_case([9, -1, 3], num_heads=4, num_kv_heads=2, head_dim=4, block_size=4)
    assert case.k_pool.shape == case.v_pool.shape == (9 // 4 + 2, 2, 4, 4)
    assert case.k_pool.isnan().all()
    assert case.slots.tolist() == [9, -1, 3]
    assert [tuple(x.shape) for x in (case.q, case.k, case.v)] == [(3, 4, 4), (3, 2, 4), (3, 2, 4)]
    # Angles of position 7: 7 and 7 / 100.
    row = [math.cos(7), math.cos(0.07), math.sin(7), math.sin(0.07)]
    assert case.cos_sin[7].tolist() == pytest.approx(row, rel=1e-5)
    case.positions = torch.tensor([7, 0, 0])
    turned = case.rotated(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).expand(3, 1, 4))
    first = [
        math.cos(7) - 3 * math.sin(7), 2 * math.cos(0.07) - 4 * math.sin(0.07),
        math.sin(7) + 3 * math.cos(7), 2 * math.sin(0.07) + 4 * math.cos(0.07),
    ]  # fmt: skip
    assert turned[0, 0].tolist() == pytest.approx(first, rel=1e-5)
    assert turned[1, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
