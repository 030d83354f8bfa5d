import io

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedlab.sim.errors import TraceError
from schedlab.traces import READERS, Trace, read, stream, workload, write
from schedlab.traces.arrivals import gamma, on_off, varying
from schedlab.traces.prefix_hashes import PrefixHashes

relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
labels = st.none() | st.text(
    st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=("Cs",)), min_size=1
)


@st.composite
def traces_of(draw):
    n = draw(st.integers(1, 12))
    gaps = draw(st.lists(st.integers(0, 10**13), min_size=n, max_size=n))
    prompts = draw(st.lists(st.integers(1, 10**6), min_size=n, max_size=n))
    outputs = draw(st.lists(st.integers(1, 10**6), min_size=n, max_size=n))
    columns = {}
    if draw(st.booleans()):
        columns["arrival_ns"] = np.cumsum(gaps)
    if draw(st.booleans()):
        columns["priority"] = np.array(draw(st.lists(st.integers(-9, 9), min_size=n, max_size=n)))
    if draw(st.booleans()):
        targets = st.floats(0.001, 1e6) | st.just(float("nan"))
        columns["deadline_s"] = np.array(draw(st.lists(targets, min_size=n, max_size=n)))
    if draw(st.booleans()):
        values = np.empty(n, dtype=object)
        values[:] = draw(st.lists(labels, min_size=n, max_size=n))
        columns["tenant"] = values
    if draw(st.booleans()):
        block = draw(st.sampled_from([16, 512]))
        rows = [
            draw(st.lists(st.integers(0, 2**40), max_size=min(5, -(-length // block))))
            for length in prompts
        ]
        columns["prefix"] = PrefixHashes.from_rows(rows, block)
    return Trace(prompt_tokens=np.array(prompts), output_tokens=np.array(outputs), **columns)


def same(one, other):
    assert set(one.columns()) == set(other.columns())
    for name, values in one.columns().items():
        if name == "prefix":
            assert other.prefix.rows() == values.rows()
        else:
            np.testing.assert_array_equal(getattr(other, name), values)


@pytest.mark.slow
@relaxed
@given(trace=traces_of(), suffix=st.sampled_from([".csv", ".csv.gz", ".parquet"]))
def test_traces_written_and_read_back_are_the_same(trace, suffix, tmp_path):
    same(trace, read(write(trace, tmp_path / f"t{suffix}")))


@pytest.mark.slow
@relaxed
@given(trace=traces_of(), chunk_rows=st.integers(1, 13))
def test_traces_streamed_in_any_chunks_join_to_the_whole(trace, chunk_rows, tmp_path):
    path = write(trace, tmp_path / "t.csv")
    same(read(path), Trace.concat(list(stream(path, chunk_rows=chunk_rows))))


@pytest.mark.slow
@relaxed
@given(trace=traces_of(), cut=st.integers(0, 12))
def test_traces_cut_in_two_and_joined_are_the_same(trace, cut):
    cut = min(cut, len(trace))
    rows = [np.arange(cut), np.arange(cut, len(trace))]
    same(trace, Trace.concat([trace.take(part) for part in rows if len(part)]))


@pytest.mark.slow
@relaxed
@given(trace=traces_of(), size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 1024]))
def test_prefix_blocks_in_another_size_never_share_more(trace, size):
    if trace.prefix is None:
        return
    fine = trace.prefix.with_block_tokens(size, trace.prompt_tokens).rows()
    coarse = trace.prefix.rows()
    for i in range(len(trace)):
        assert len(fine[i]) <= trace.prompt_tokens[i] // size
        for j in range(i):
            shared = sum(a == b for a, b in zip(coarse[i], coarse[j], strict=False))
            now = sum(a == b for a, b in zip(fine[i], fine[j], strict=False))
            assert now * size <= shared * trace.prefix.block_tokens


@pytest.mark.slow
@relaxed
@given(trace=traces_of(), factor=st.floats(0.01, 100.0))
def test_traces_scaled_there_and_back_keep_order_and_span(trace, factor):
    if trace.arrival_ns is None:
        return
    scaled = trace.scale(factor)
    assert (np.diff(scaled.arrival_ns) >= 0).all()
    assert scaled.duration_s == pytest.approx(trace.duration_s / factor, rel=1e-9, abs=2e-9)


@pytest.mark.slow
@relaxed
@given(trace=traces_of(), max_model_len=st.integers(2, 2000))
def test_workload_never_tells_the_true_length_and_keeps_the_order(trace, max_model_len):
    times = np.arange(len(trace)) if trace.arrival_ns is None else None
    arrivals = list(workload(trace, max_model_len=max_model_len, arrival_ns=times))
    assert [a.output_tokens for a in arrivals] == trace.output_tokens.tolist()
    assert [a.request.id for a in arrivals] == list(range(len(trace)))
    permuted = Trace(**{**trace.columns(), "output_tokens": trace.output_tokens[::-1]})
    other = workload(permuted, max_model_len=max_model_len, arrival_ns=times)
    assert [str(a.request) for a in arrivals] == [str(a.request) for a in other]


@pytest.mark.slow
@relaxed
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    make=st.sampled_from(
        [
            lambda seed: gamma(3.0, 0.3, seed=seed),
            lambda seed: on_off(3.0, 0.5, 1.5, 0.2, seed=seed),
            lambda seed: varying(3.0, 0.5, 5.0, seed=seed),
        ]
    ),
)
def test_arrival_process_in_any_pieces_equals_the_whole(seed, sizes, make):
    draw = make(seed)
    pieces = np.concatenate([draw(n) for n in sizes])
    assert pieces.tolist() == make(seed)(sum(sizes)).tolist()
    assert (np.diff(pieces) >= 0).all()


def attempted(path, format):
    """Return the trace, or the message of the only error a reader may raise."""
    try:
        return read(path, format, tokenizer="estimate"), ""
    except TraceError as error:
        return None, str(error)


@relaxed
@given(
    data=st.binary(max_size=300),
    header=st.sampled_from(
        [
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
            b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
            b"arrived_at,num_prefill_tokens,num_decode_tokens\n",
            b"arrival_s,prompt_tokens,output_tokens,prefix_hash_ids,priority,deadline_s\n",
            b'{"timestamp": 0, "input_length": 6, "output_length": 5}\n',
            b'{"prompt": "a", "output_tokens": 5}\n',
            b'[{"conversations": ',
            b"",
        ]
    ),
    name=st.sampled_from([*READERS, "auto"]),
)
def test_reader_given_any_bytes_reads_or_raises_trace_error(data, header, name, tmp_path):
    path = tmp_path / "any"
    path.write_bytes(header + data)
    trace, error = attempted(path, name)
    assert (trace is not None and len(trace) >= 1) or str(path) in error


@pytest.mark.slow
@relaxed
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["0", "1.5", "-1", "", "nan", "1e400", "x", "1e30", "0x10", "٣"]),
            st.sampled_from(["1", "0", "-3", "2.0", "2.5", "", "1e3", "inf", "9" * 25]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_reader_given_odd_cells_reads_or_raises_trace_error(rows, tmp_path):
    text = io.StringIO()
    text.write("arrival_s,prompt_tokens,output_tokens\n")
    text.writelines(f"{time},{tokens},1\n" for time, tokens in rows)
    path = tmp_path / "odd.csv"
    path.write_text(text.getvalue())
    trace, error = attempted(path, "auto")
    assert (trace is not None and len(trace) == len(rows)) or f"{path}:" in error
