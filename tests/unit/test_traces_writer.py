import numpy as np
import pytest

from schedlab.sim.errors import TraceError
from schedlab.traces import Trace, read, write
from schedlab.traces.prefix_hashes import PrefixHashes


def full_trace() -> Trace:
    return Trace(
        arrival_ns=np.array([1, 1_500_000_000, 7_000_000_000_001]),
        prompt_tokens=np.array([40, 20, 64]),
        output_tokens=np.array([1, 2, 3]),
        max_tokens=np.array([0, 5, 6]),
        priority=np.array([-1, 0, 2]),
        deadline_s=np.array([np.nan, 0.1, 3.0]),
        slo_ttft_ms=np.array([100.0, np.nan, 1 / 3]),
        slo_tpot_ms=np.array([np.nan, np.nan, 5.0]),
        application=np.array(["chat", None, "a,b"], dtype=object),
        session=np.array([None, "s", "s"], dtype=object),
        tenant=np.array(["t", "t", None], dtype=object),
        prompt=np.array(["two\nlines", 'a "quote", é', "x" * 200_000], dtype=object),
        prefix=PrefixHashes.from_rows([[1, 2], [], [1, 2, 3, 2**62]], 16),
    )


def assert_same(one: Trace, other: Trace):
    assert set(one.columns()) == set(other.columns())
    for name, values in one.columns().items():
        if name == "prefix":
            assert other.prefix.rows() == values.rows()
            assert other.prefix.block_tokens == values.block_tokens
        else:
            np.testing.assert_array_equal(getattr(other, name), values)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_write_then_read_gives_the_same_trace(suffix, tmp_path):
    path = write(full_trace(), tmp_path / f"t{suffix}")
    assert_same(full_trace(), read(path))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_write_lengths_only_has_no_time_column(suffix, tmp_path):
    trace = Trace(prompt_tokens=np.array([4, 5]), output_tokens=np.array([1, 2]))
    path = write(trace, tmp_path / f"t{suffix}")
    assert_same(trace, read(path))


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_write_twice_gives_equal_bytes_and_leaves_nothing_else(suffix, tmp_path):
    first = write(full_trace(), tmp_path / f"a{suffix}").read_bytes()
    assert write(full_trace(), tmp_path / f"b{suffix}").read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a{suffix}", f"b{suffix}"]


def test_write_that_fails_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("precious")
    monkeypatch.setattr("traces.writer.csv.writer", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(full_trace(), path)
    assert path.read_text() == "precious"
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_write_to_unknown_suffix_or_folder_raises(tmp_path):
    with pytest.raises(TraceError, match=r"use one of \.csv, \.csv\.gz, \.parquet"):
        write(full_trace(), tmp_path / "t.json")
    with pytest.raises(TraceError, match="no such folder"):
        write(full_trace(), tmp_path / "none" / "t.csv")


def test_csv_times_are_exact_decimals(tmp_path):
    text = write(full_trace().take([0, 1]), tmp_path / "t.csv").read_text()
    assert text.startswith("arrival_s,prompt_tokens,output_tokens,max_tokens,priority,deadline_s")
    assert "\n0.000000001,40,1," in text
    assert "\n1.5,20,2," in text


def test_trace_written_for_load_generators_is_burstgpts_and_reads_back(tmp_path):
    path = write(full_trace(), tmp_path / "t.csv", "burstgpt")
    lines = path.read_text().splitlines()
    assert lines[0] == "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    assert lines[2] == "1.5,GPT-4,20,2,22,API log"
    back = read(path)
    assert back.report.format == "burstgpt"
    np.testing.assert_array_equal(back.prompt_tokens, [40, 20, 64])
    np.testing.assert_array_equal(back.output_tokens, [1, 2, 3])


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("t.parquet", "burstgpt", "is CSV"),
        ("t.csv.gz", "burstgpt", "is CSV"),
        ("t.csv", "burstgtp", "did you mean burstgpt"),
    ],
)
def test_layout_that_cannot_be_written_is_refused(name, layout, said, tmp_path):
    with pytest.raises(TraceError, match=said):
        write(full_trace(), tmp_path / name, layout)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_trace_for_which_the_disk_has_no_room_is_named_and_leaves_the_old_one(
    tmp_path, full_disk, name
):
    path = tmp_path / name
    path.write_text("old")
    with full_disk(64), pytest.raises(OSError, match=f"File too large: '{path}'"):
        write(full_trace(), path)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [(name, "old")]
