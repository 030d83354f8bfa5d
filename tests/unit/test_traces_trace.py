import dataclasses
import re

import numpy as np
import pytest

from schedlab.sim.errors import TraceError
from schedlab.traces import Trace
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.read_report import ReadReport, merged

SECOND = 1_000_000_000


def make_trace(**columns) -> Trace:
    base = {
        "arrival_ns": np.array([0, 1, 3, 6]) * SECOND,
        "prompt_tokens": np.array([10, 20, 30, 40]),
        "output_tokens": np.array([1, 2, 3, 4]),
    }
    return Trace(**{**base, **columns})


def test_trace_columns_after_construction_are_read_only():
    trace = make_trace()
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_tokens[0] = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace.arrival_ns = None


def test_trace_made_of_writable_arrays_leaves_them_writable():
    prompt_tokens = np.array([10, 20, 30, 40])
    make_trace(prompt_tokens=prompt_tokens)
    prompt_tokens[0] = 11
    assert prompt_tokens[0] == 11


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt_tokens": [10, 0, 30, 40]}, "row 1: prompt_tokens must be >= 1, got 0"),
        ({"output_tokens": [1, 2, 3, 0]}, "row 3: output_tokens must be >= 1, got 0"),
        ({"prompt_tokens": [10, 1.5, 3, 4]}, "row 1: prompt_tokens is 1.5, expected a whole"),
        ({"prompt_tokens": [10, np.nan, 3, 4]}, "row 1: prompt_tokens is nan"),
        ({"arrival_ns": [0.0, 1.0, np.inf, 2.0]}, "row 2: arrival_ns is inf"),
        ({"arrival_ns": [0, 5, 4, 6]}, "row 2: arrival_ns is earlier than the row before it"),
        ({"arrival_ns": [-1, 5, 6, 7]}, "row 0: arrival_ns must be >= 0"),
        ({"arrival_ns": [0, 1]}, "arrival_ns has 2 rows, expected 4"),
        ({"max_tokens": [1, 2, -3, 4]}, "row 2: max_tokens must be >= 0"),
        ({"deadline_s": [1.0, 0.0, np.nan, 1.0]}, "row 1: deadline_s must be > 0"),
        (
            {"deadline_s": [1e12, 1e13, 1.0, 1.0]},
            "row 1: deadline_s must be 1e-06 to 1e+15 ms, got",
        ),
        ({"slo_ttft_ms": [1e15, 1e-6, 1e16, 1.0]}, "row 2: slo_ttft_ms must be 1e-06 to 1e+15 ms"),
        ({"slo_tpot_ms": [5e-324, 1.0, 1.0, 1.0]}, "row 0: slo_tpot_ms must be 1e-06 to 1e+15 ms"),
        ({"prompt_tokens": ["a", "b", "c", "d"]}, "prompt_tokens must be integers"),
    ],
)
def test_trace_with_impossible_value_raises_and_names_the_row(columns, message):
    with pytest.raises(TraceError, match=re.escape(message)):
        make_trace(**{name: np.array(values) for name, values in columns.items()})


def test_trace_without_rows_raises():
    with pytest.raises(TraceError, match="no requests"):
        Trace(prompt_tokens=np.array([], dtype=int), output_tokens=np.array([], dtype=int))


def test_scale_by_two_halves_every_gap():
    assert make_trace().scale(2.0).arrival_ns.tolist() == [
        0,
        SECOND // 2,
        3 * SECOND // 2,
        3 * SECOND,
    ]


def test_scale_keeps_times_of_64_bits_and_refuses_a_last_one_beyond_them():
    def scaled(last_ns, factor):
        return make_trace(arrival_ns=np.array([0, 3, 8, last_ns])).scale(factor)

    assert scaled(2**61, 0.5).arrival_ns.tolist() == [0, 6, 16, 2**62]
    assert scaled(10, 3.0).arrival_ns.tolist() == [0, 1, 3, 3], "to the nearest"
    assert "arrival rate multiplied by 3" in scaled(10, 3.0).report.notes
    for last_ns, factor in ((2**62, 0.5), (2**61, 0.1)):
        with pytest.raises(TraceError, match=f"rate_factor {factor} stretches the trace beyond"):
            scaled(last_ns, factor)


@pytest.mark.parametrize("factor", [0, -1.0, np.nan, np.inf])
def test_scale_by_no_positive_number_raises(factor):
    with pytest.raises(TraceError, match="rate_factor must be a positive number"):
        make_trace().scale(factor)


def test_fit_keeps_what_just_fits_and_clips_down_to_one_token():
    # 20 + 10 tokens are 30; 29 of output leave room for one of prompt, 30 for none.
    trace = Trace(prompt_tokens=[20, 21, 20, 20], output_tokens=[10, 10, 29, 30])
    assert trace.fit(30, "drop").prompt_tokens.tolist() == [20]
    clipped = trace.fit(30, "clip_prompt")
    assert clipped.prompt_tokens.tolist() == [20, 20, 1]
    assert "2 prompts clipped to fit" in clipped.report.notes
    assert clipped.report.rows_dropped == {"longer than 30 tokens": 1}


def test_prompt_has_no_more_blocks_than_its_tokens_begin():
    two = PrefixHashes.from_rows([[1, 2]], 16)
    assert len(Trace(prompt_tokens=[17], output_tokens=[1], prefix=two)) == 1
    with pytest.raises(TraceError, match="2 prefix hash blocks of 16 tokens for 16 prompt tokens"):
        Trace(prompt_tokens=[16], output_tokens=[1], prefix=two)


def test_slice_begins_at_the_time_asked_for_not_at_the_first_request():
    trace = Trace(
        prompt_tokens=[1, 2, 3], output_tokens=[1, 1, 1], arrival_ns=[0, 10**9, 2 * 10**9]
    )
    cut = trace.slice(0.25, 2.5)
    assert cut.prompt_tokens.tolist() == [2, 3]
    assert cut.arrival_ns.tolist() == [750_000_000, 1_750_000_000]


def test_slice_by_time_is_half_open_and_starts_at_zero():
    part = make_trace().slice(1, 6)
    assert part.arrival_ns.tolist() == [0, 2 * SECOND]
    assert part.prompt_tokens.tolist() == [20, 30]
    assert "cut to 1..6 s, 1 s became 0" in part.report.notes


def test_slice_where_nothing_arrives_raises_and_tells_the_range():
    with pytest.raises(
        TraceError, match=r"no request arrives in 7\.\.8 s; the trace covers 0\.\.6 s"
    ):
        make_trace().slice(7, 8)


@pytest.mark.parametrize("bounds", [(3, 3), (-1, 2), (2, 1), (0, float("nan")), (1e300, 1e301)])
def test_slice_with_senseless_bounds_raises(bounds):
    with pytest.raises(TraceError):
        make_trace().slice(*bounds)


def test_slice_without_an_end_or_with_a_huge_one_keeps_the_rest():
    assert len(make_trace().slice(1)) == 3
    assert len(make_trace().slice(1, 1e300)) == 3


def test_slice_of_lengths_only_raises():
    with pytest.raises(TraceError, match="no arrival times"):
        make_trace(arrival_ns=None).slice(0, 1)


def test_head_longer_than_trace_returns_all():
    assert len(make_trace().head(10)) == 4
    assert len(make_trace().head(2)) == 2
    with pytest.raises(TraceError, match="head needs >= 1"):
        make_trace().head(0)


def test_take_keeps_every_column_in_step():
    trace = make_trace(
        prefix=PrefixHashes.from_rows([[1], [], [2, 3], [4]], 16),
        application=np.array(["a", None, "b", "c"], dtype=object),
        deadline_s=np.array([1.0, np.nan, 2.0, 3.0]),
    )
    part = trace.take([1, 2])
    assert part.prefix.rows() == [(), (2, 3)]
    assert part.application.tolist() == [None, "b"]
    assert np.isnan(part.deadline_s[0])
    assert part.deadline_s[1] == 2.0
    assert trace.take(trace.prompt_tokens > 25).prompt_tokens.tolist() == [30, 40]


def test_take_out_of_range_or_out_of_order_raises():
    with pytest.raises(TraceError, match="out of range"):
        make_trace().take([4])
    with pytest.raises(TraceError, match="earlier than the row before"):
        make_trace().take([2, 1])


def test_concat_fills_missing_columns_and_adds_up_reports():
    first = make_trace(report=ReadReport(rows_read=5).dropped("failed", 1))
    second = make_trace(
        arrival_ns=np.array([6, 7, 8, 9]) * SECOND,
        priority=np.array([1, 2, 3, 4]),
        tenant=np.array(["x"] * 4, dtype=object),
        slo_ttft_ms=np.array([5.0] * 4),
        report=ReadReport(rows_read=6).dropped("failed", 2),
    )
    joined = Trace.concat([first, second])
    assert len(joined) == 8
    assert joined.priority.tolist() == [0, 0, 0, 0, 1, 2, 3, 4]
    assert joined.tenant.tolist() == [None] * 4 + ["x"] * 4
    assert np.isnan(joined.slo_ttft_ms[:4]).all()
    assert joined.report.rows_read == 11
    assert joined.report.rows_dropped == {"failed": 3}


def report_of(path, kind, *notes, rows=1):
    return ReadReport(kind, path, rows, time_unit="ms", time_zero="noon", notes=notes)


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (("a.csv", "azure"), ("a.csv", "azure"), ()),
        (("a.csv", "azure"), ("a.csv", "burstgpt"), ("joined with a.csv",)),
        (("a.csv", "azure"), ("b.csv", "azure"), ("joined with b.csv",)),
        ((None, "memory"), (None, "memory"), ()),
        ((None, "memory"), (None, "synthetic"), ("joined with synthetic",)),
        ((None, "synthetic"), ("b.csv", "azure"), ("joined with b.csv",)),
    ],
)
def test_reports_of_other_files_or_formats_say_so_when_they_are_joined(first, second, joined):
    one = report_of(*first, "n", "o", rows=4).dropped("failed", 1)
    two = report_of(*second, "p", "o", rows=7).dropped("empty", 2).dropped("failed", 5)
    found = merged([one, two])
    assert (found.path, found.format, found.rows_read) == (*first, 11)
    assert found.rows_dropped == {"failed": 6, "empty": 2}
    assert found.notes == ("n", "o", *joined, "p")
    assert (found.time_unit, found.time_zero, found.tokens) == ("ms", "noon", "as given")
    assert merged([one]) == one


def test_report_is_told_line_by_line_and_leaves_out_what_it_does_not_know():
    assert ReadReport().lines() == ["source: memory", "tokens: as given"]
    told = report_of("a.csv", "azure", "first", "then", rows=1234).dropped("failed", 5678)
    assert dataclasses.replace(told.dropped("empty", 0), tokens="of the publisher").lines() == [
        "source: a.csv (azure)",
        "rows read: 1,234",
        "rows dropped: 5,678 (failed)",
        "time: in ms; 0 is noon",
        "tokens: of the publisher",
        "note: first",
        "note: then",
    ]


def test_concat_that_runs_backwards_or_mixes_kinds_raises():
    with pytest.raises(TraceError, match="earlier than the row before"):
        Trace.concat([make_trace(), make_trace()])
    with pytest.raises(TraceError, match="with and without arrival_ns"):
        Trace.concat([make_trace(), make_trace(arrival_ns=None)])


def test_fit_drop_leaves_long_rows_out_and_counts_them():
    kept = make_trace().fit(24, "drop")
    assert kept.prompt_tokens.tolist() == [10, 20]
    assert kept.report.rows_dropped == {"longer than 24 tokens": 2}


def test_fit_clip_prompt_shortens_prompts_blocks_and_says_so():
    trace = make_trace(
        prefix=PrefixHashes.from_rows([[1], [2, 3], [4, 5, 6], [7, 8, 9, 10]], 10),
        prompt=np.array(["a", "b", "c", "d"], dtype=object),
    )
    kept = trace.fit(24, "clip_prompt")
    assert kept.prompt_tokens.tolist() == [10, 20, 21, 20]
    assert kept.prefix.rows() == [(1,), (2, 3), (4, 5), (7, 8)]
    assert kept.prompt.tolist() == ["a", "b", None, None]
    assert "2 prompts clipped to fit" in kept.report.notes


def test_fit_where_output_alone_is_too_long_drops_the_row():
    trace = make_trace(output_tokens=np.array([1, 2, 3, 50]))
    assert len(trace.fit(40, "clip_prompt")) == 3
    with pytest.raises(TraceError, match="too_long must be"):
        trace.fit(40, "clip")
    with pytest.raises(TraceError, match="no request fits"):
        trace.fit(2, "drop")


def test_prefix_split_into_finer_blocks_keeps_full_blocks_only():
    prefix = PrefixHashes.from_rows([[7, 8], [7, 9]], 64)
    fine = prefix.with_block_tokens(16, np.array([100, 128]))
    assert fine.rows() == [(28, 29, 30, 31, 32, 33), (28, 29, 30, 31, 36, 37, 38, 39)]


def test_prefix_merged_into_coarser_blocks_takes_the_last_part():
    prefix = PrefixHashes.from_rows([[1, 2, 3, 4, 5], [1, 2, 3]], 16)
    assert prefix.with_block_tokens(32, np.array([80, 60])).rows() == [(2, 4), (2,)]


def test_prefix_in_blocks_that_do_not_divide_raises():
    prefix = PrefixHashes.from_rows([[1]], 16)
    with pytest.raises(TraceError, match="one size must divide the other"):
        prefix.with_block_tokens(24, np.array([16]))
    with pytest.raises(TraceError, match="too large to split"):
        PrefixHashes.from_rows([[2**60]], 64).with_block_tokens(16, np.array([64]))


def test_prefix_takes_ids_of_64_bits_and_no_more():
    least, most = -(2**63), 2**63 - 1
    column = PrefixHashes.from_rows([[least, most], [], (0,)], 16)
    assert column.rows() == [(least, most), (), (0,)]
    assert (column.offsets.tolist(), column.block_tokens) == ([0, 2, 2, 3], 16)
    for row in ([0, most + 1], [least - 1, 0]):
        with pytest.raises(TraceError, match=r"row 2.*block ids must fit in 64 bits, signed"):
            PrefixHashes.from_rows([[1], [2], row], 16)
    for row in ([1, 2.0], [True], ["3"], "45", None):
        with pytest.raises(TraceError, match=r"row 1.*block ids must be a list of integers"):
            PrefixHashes.from_rows([[1], row, [2]], 16)
