import gzip
import json
import os
import re
from pathlib import Path

import pytest

from schedlab.sim.errors import TraceError
from schedlab.traces import read, stream
from schedlab.traces.readers import READERS
from schedlab.traces.readers.source import csv_records, jsonl_records

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MOON = '{"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
OWN = "arrival_s,prompt_tokens,output_tokens\n1,10,5\n"
SIM = '{"input_toks": 4, "output_toks": 1, "arrival_time_ns": 0}\n'

BAD_ROWS = [
    ("azure", AZURE + "2023-11-16 18:15:46.69,374", r":3: 2 cells where the header has 3"),
    ("azure", AZURE + "2023-11-16 18:15:46.69,x,4", r":3: ContextTokens is 'x', expected a number"),
    ("azure", AZURE + "2023-11-16 18:15:46.69,1_0,4", r":3: ContextTokens is '1_0'"),
    ("azure", AZURE + "2023-11-16 18:15:46.69,nan,4", r":3: ContextTokens is 'nan'"),
    ("azure", AZURE + "2023-11-16 18:15:46.69,4.5,4", r":3: ContextTokens is '4.5', .* whole"),
    ("azure", AZURE + "2023-11-16 18:15:46.69,-4,4", r":3: -4 prompt tokens, expected >= 1"),
    ("azure", AZURE + "2023-11-16 18:15:46.69,4,0", r":3: 0 output .*drop_empty.*convert --drop"),
    ("azure", AZURE + "16/11/2023 18:15,4,4", r":3: TIMESTAMP is '16/11/2023 18:15', expected"),
    ("azure", AZURE + "2023-11-31 18:15:46,4,4", r":3: TIMESTAMP: "),
    ("azure", AZURE + "2023-11-16 18:15:46.67,4,4", r":3: arrives 0.01 s before the row above"),
    ("azure", AZURE + "\n2023-11-16 18:15:40,4,4", r":4: arrives 6.68 s before the row above"),
    ("azure", AZURE + "2262-01-01 00:00:00,4,4", r":3: TIMESTAMP is '2262-01-01 .* 1678 to"),
    ("azure", AZURE + "1677-12-31 23:59:59,4,4", r":3: TIMESTAMP is '1677-12-31 .* 1678 to"),
    ("azure", AZURE + "2023-11-16 18:15:47,2147483648,4", r":3: 2147483648 prompt tokens, exp"),
    ("azure", AZURE + "2023-11-16 18:15:47,4,9999999999", r":3: 9999999999 output tokens, exp"),
    ("azure", AZURE.replace("\n", ",ContextTokens\n", 1), r":1: two columns are called 'Conte"),
    ("schedlab", OWN.replace("\n", ",arrival_s\n", 1), r":1: two columns are called 'arrival_s'"),
    ("mooncake", MOON.replace("[0, 1]", "{}"), r":1: block ids must be a list of integers"),
    ("mooncake", MOON.replace("[0, 1]", "false"), r":1: block ids must be a list of integers"),
    ("azure", "", r"the file is empty"),
    ("azure", "\n\n", r"the file is empty"),
    ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n", r"no rows"),
    (
        "azure",
        "TIMESTAMP,ContextToken,GeneratedTokens\n",
        r":1: no column 'ContextTokens'; did you",
    ),
    (
        "azure",
        "TIMESTAMP,ContextTokens\n",
        r":1: no column 'GeneratedTokens'; there are TIMESTAMP, ContextTokens$",
    ),
    (
        "azure",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n",
        r":2: 2 cells where the header has 3 \(is the line truncated\?\)",
    ),
    (
        "azure",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3,4\n",
        r":2: 4 cells where the header has 3 \(a comma too many\?\)",
    ),
    ("burstgpt", BURST + "5,a,1,0,1,b\n", r"1 rows, none usable \(1 failed call: 0 tokens\)"),
    ("burstgpt", BURST + "nan,a,1,1,1,b\n", r":2: Timestamp is 'nan', expected a finite time"),
    ("mooncake", MOON + '{"timestamp": 6, "input_le', r":2: no complete JSON object"),
    ("mooncake", MOON + '{"timestamp": 6, "input_length": 9}', r":2: no column 'output_length'"),
    ("mooncake", MOON + "[1, 2]", r":2: expected a JSON object"),
    ("mooncake", MOON + MOON.replace("5,", "4,", 1), r":2: arrives 0.001 s before"),
    ("mooncake", MOON.replace("[0, 1]", "[0, 1.5]"), r":1: block ids must be a list of integers"),
    ("mooncake", MOON.replace("[0, 1]", "[0, 1, 2]"), r":1: 3 hash_ids for 600 tokens fit neither"),
    ("mooncake", MOON + MOON.replace("[0, 1]", "[0, 1, 2]"), r":2: 3 prefix hash blocks"),
    ("mooncake", MOON.replace("5,", "true,", 1), r":1: timestamp is True, expected a time"),
    ("mooncake", MOON.replace("5,", "-5,", 1), r":1: arrival is before time 0"),
    ("mooncake", MOON.replace("600", "NaN"), r":1: input_length is nan"),
    ("bailian", MOON.replace("{", '{"chat_id": "x", '), r":1: chat_id and parent_chat_id must be"),
    (
        "bailian",
        MOON.replace("{", '{"chat_id": 1, ').replace("[0, 1]", "[0, []]"),
        r":1: block ids",
    ),
    ("vidur", "arrived_at,num_prefill_tokens,num_decode_tokens\n1e300,1,1\n", r":2: .*wrong unit"),
    (
        "llmservingsim",
        '{"session_id": "a", "arrival_time_ns": 0, "sub_requests": [3]}',
        r":1: sub_requests must be a list of objects",
    ),
    (
        "llmservingsim",
        '{"arrival_time_ns": 0, "sub_requests": [{"input_toks": 3}]}',
        r":1: sub_request 1 has no field 'output_toks'",
    ),
    ("llmservingsim", SIM + '{"input_toks": 4}', r":2: no field 'output_toks'"),
    ("llmservingsim", SIM[:-2] + ', "input_tok_ids": [1]}', r":1: 1 input_tok_ids but input_toks"),
    ("llmservingsim", SIM.replace("4", "32")[:-2] + ', "hash_ids": [1]}', r":1: 1 hash_ids cannot"),
    ("sharegpt", '[{"conversations": [{"value": "a"}', r":1: no complete JSON"),
    ("sharegpt", '[{"conversations": 3}]', r"entry 1 has no list 'conversations'"),
    ("sharegpt", '[{"conversations": [{"value": 3}, {}]}]', r"entry 1: a turn has no text"),
    ("vllm_custom", '{"prompt": 3, "output_tokens": 1}', r":1: prompt must be text, got 3"),
    ("schedlab", OWN + "2,10,5\n1.5,10,5\n", r":4: arrives 0.5 s before the row above it; sort"),
    ("schedlab", OWN + ",10,5\n", r":3: arrival_s is '', expected a time"),
    ("schedlab", OWN + "inf,10,5\n", r":3: arrival_s is 'inf', expected a finite time"),
    ("schedlab", OWN + "-2,10,5\n", r":3: arrives 3 s before"),
    ("schedlab", OWN + "1e999999999,10,5\n", r":3: arrival_s .* beyond 292 years: wrong unit"),
    ("schedlab", OWN + "2,1e999999999,5\n", r":3: prompt_tokens .* too large for 64 bits"),
    ("mooncake", MOON + '{"a": ' + "[" * 100_000, r":2: no complete JSON object"),
    ("sharegpt", "[" * 100_000, r"nested too deep"),
    (
        "schedlab",
        OWN.replace("arrival_s", "arival_s"),
        r":1: unknown column 'arival_s'; did you m",
    ),
    (
        "schedlab",
        "prompt_tokens,output_tokens,max_tokens\n1,1,4\n1,1,-4\n",
        r":3: max_tokens must be",
    ),
    ("schedlab", "prompt_tokens,output_tokens,deadline_s\n1,1,soon\n", r":2: deadline_s is 'soon'"),
    ("schedlab", "prompt_tokens,output_tokens,prefix_hash_ids\n1,1,a b\n", r":2: prefix_hash_ids"),
    (
        "schedlab",
        "prompt_tokens,output_tokens,prefix_hash_ids,hash_block_tokens\n20,1,7,0\n",
        r":2: hash_block_tokens must be >= 1, got 0",
    ),
    ("schedlab", OWN + "2,99999999999999999999,5\n", r":3: prompt_tokens .* too large for 64 bits"),
    ("schedlab", OWN + f"2,{2**63},5\n", r":3: prompt_tokens .* too large for 64 bits"),
    ("schedlab", OWN + f"2,{2**63}.0,5\n", r":3: prompt_tokens .* too large for 64 bits"),
]


@pytest.mark.parametrize(("format", "text", "message"), BAD_ROWS)
def test_reader_given_bad_file_names_file_and_line(format, text, message, tmp_path):
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as error:
        read(path, format, tokenizer="estimate")
    assert str(path) in str(error.value)


@pytest.mark.parametrize("format", READERS)
def test_reader_given_binary_garbage_raises_trace_error(format, tmp_path):
    path = tmp_path / "garbage"
    path.write_bytes(bytes(range(256)) * 40)
    with pytest.raises(TraceError):
        read(path, format, tokenizer="estimate")


def test_gzip_cut_short_raises_and_names_the_last_line(tmp_path):
    path = tmp_path / "cut.csv.gz"
    rows = "".join(f"{i},{i % 977 + 1},{i % 89 + 1}\n" for i in range(20_000))
    whole = gzip.compress(("arrival_s,prompt_tokens,output_tokens\n" + rows).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"after line \d+: the gzip file is damaged or cut short"):
        read(path)


def test_gzip_cut_before_a_line_was_read_raises_and_names_the_file_alone(tmp_path):
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress(OWN.encode())[:-9])
    with pytest.raises(TraceError, match=r"cut\.csv\.gz: the gzip file is damaged or cut short"):
        read(path)


def test_text_that_is_not_utf8_raises(tmp_path):
    path = tmp_path / "latin.csv"
    path.write_bytes(OWN.encode() + "2,10,5\xff\n".encode("latin-1"))
    with pytest.raises(TraceError, match="not UTF-8 text"):
        read(path)


def test_parquet_without_required_column_or_truncated_raises(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"arrival_s": [0.0], "prompt_tokens": [1]}), path)
    with pytest.raises(TraceError, match="no column 'output_tokens'"):
        read(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="not readable as Parquet"):
        read(path)
    pq.write_table(pa.table({"prompt_tokens": [1, None], "output_tokens": [1, 1]}), path)
    with pytest.raises(TraceError, match=r": row 2: prompt_tokens is None"):
        read(path)


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 9])
@pytest.mark.parametrize(("name", "place"), [("t.csv", ":6: "), ("t.parquet", ": row 5: ")])
def test_wrong_row_has_the_same_number_however_many_are_read_at_once(
    tmp_path, name, place, chunk_rows
):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, prompts = tmp_path / name, [3, 4, 5, 6, -7, 8]
    if name.endswith("csv"):
        rows = "".join(f"{tokens},1\n" for tokens in prompts)
        path.write_text(f"prompt_tokens,output_tokens\n{rows}")
    else:
        pq.write_table(pa.table({"prompt_tokens": prompts, "output_tokens": [1] * 6}), path)
    with pytest.raises(TraceError, match=f"{name}{place}-7 prompt tokens"):
        list(stream(path, chunk_rows=chunk_rows))


def test_unknown_content_lists_formats_and_what_was_seen(tmp_path):
    path = tmp_path / "what.csv"
    path.write_text("when,how_much\n1,2\n")
    with pytest.raises(TraceError, match=r"CSV with columns 'when, how_much'.*azure.*mooncake"):
        read(path)


def test_unknown_format_name_suggests_the_nearest(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(OWN)
    with pytest.raises(TraceError, match=r"did you mean mooncake\?"):
        read(path, "moncake")


def test_link_to_nothing_and_pipe_are_called_what_they_are(tmp_path):
    (tmp_path / "t.csv").symlink_to(tmp_path / "gone.csv")
    with pytest.raises(TraceError, match=r"t\.csv is a link to .*gone\.csv, where no file is"):
        read(tmp_path / "t.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (tmp_path / "pipe.csv", Path("/dev/null")):
        with pytest.raises(TraceError, match=f"{path}: cannot be read: it is not a file but a pi"):
            read(path)
    reads, writes = os.pipe()
    with open(reads, "rb"), open(writes, "wb"):
        path = Path(f"/dev/fd/{reads}")
        if path.exists():
            with pytest.raises(TraceError, match=f"{path}: cannot be read: it is not a file but a"):
                read(path)


@pytest.mark.parametrize(
    ("ending", "told"), [("zst", r"; unpack it first \(or use gzip\): unzstd$"), ("bin", "$")]
)
def test_file_packed_otherwise_than_by_gzip_is_to_be_unpacked_first(tmp_path, ending, told):
    path = tmp_path / f"t.csv.{ending}"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x24\xff\xff\xff")
    with pytest.raises(TraceError, match=rf"not UTF-8 text \([^)]*\){told}"):
        read(path)


def test_missing_file_suggests_the_nearest_and_folder_is_refused(tmp_path):
    (tmp_path / "conversation.csv").write_text(OWN)
    with pytest.raises(TraceError, match=r"no such trace file: .*did you mean conversation\.csv"):
        read(tmp_path / "conversatoin.csv")
    with pytest.raises(TraceError, match=r"no such trace file: \S+$"):  # not all that is there
        read(tmp_path / "nope")
    with pytest.raises(TraceError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(
        TraceError, match=r"^no such trace file: azure-2023-cod; did you mean azure-2"
    ):
        read("azure-2023-cod")
    with pytest.raises(
        TraceError, match=r"^no such trace file: nowhere/azure-2023-cod; did you mean"
    ):
        read("nowhere/azure-2023-cod")


def test_stream_with_wrong_argument_raises_before_reading(tmp_path):
    with pytest.raises(TraceError, match="no such trace file"):
        stream(tmp_path / "none.csv")
    path = tmp_path / "t.csv"
    path.write_text(OWN)
    with pytest.raises(TraceError, match="chunk_rows must be >= 1"):
        stream(path, chunk_rows=0)


def test_drop_empty_leaves_calls_of_no_session_out_and_counts_them(tmp_path):
    path = tmp_path / "agents.jsonl"
    calls = [
        {"arrival_time_ns": i, "input_toks": prompt, "output_toks": output}
        for i, (prompt, output) in enumerate(((3, 4), (5, 0), (6, 7), (0, 8)))
    ]
    # A line with sub_requests tells that the file is one of sessions.
    for wrapped in (calls, [{"arrival_time_ns": 0, "sub_requests": calls[:1]}, *calls[1:]]):
        path.write_text("".join(json.dumps(call) + "\n" for call in wrapped))
        with pytest.raises(TraceError, match=r"agents\.jsonl:4: 0 prompt tokens, expected >= 1"):
            read(path)
        trace = read(path, drop_empty=True)
        assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([3, 6], [4, 7])
        assert trace.report.rows_dropped == {"no prompt or no output tokens": 2}


def test_drop_empty_leaves_rows_out_and_counts_them(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(AZURE + "2023-11-16 18:15:47.68,0,4\n2023-11-16 18:15:48.68,5,4\n")
    trace = read(path, drop_empty=True)
    assert trace.arrival_ns.tolist() == [0, 2_000_000_000]
    assert trace.report.rows_dropped == {"no prompt or no output tokens": 1}


def test_order_across_chunks_is_checked(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(OWN + "5,1,1\n4,1,1\n")
    with pytest.raises(TraceError, match=":4: arrives 1 s before"):
        list(stream(path, chunk_rows=2))


def test_csv_that_breaks_names_the_last_good_line_beyond_a_chunk_too(tmp_path):
    path = tmp_path / "broken.csv"
    path.write_bytes(b"a,b\n1,2\n3,4\n\n5,6\n" + b"x" * 200_000 + b"\xff,1\n")
    message = rf"^{re.escape(str(path))}: after line 5: not UTF-8 text"
    with pytest.raises(TraceError, match=message):
        list(csv_records(path, ("a",), 2))


def test_json_lines_that_break_name_the_last_good_line_beyond_a_chunk_too(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n\n{"a": 3}\n' + b"x" * 200_000 + b"\xff\n")
    message = rf"^{re.escape(str(path))}: after line 4: not UTF-8 text"
    with pytest.raises(TraceError, match=message):
        list(jsonl_records(path, ("a",), 2))


@pytest.mark.parametrize("chunk_rows", [1, 2, 3])
def test_own_table_whose_block_size_changes_is_refused_wherever_its_pieces_end(
    tmp_path, chunk_rows
):
    path = tmp_path / "t.csv"
    header = "prompt_tokens,output_tokens,prefix_hash_ids,hash_block_tokens"
    path.write_text(f"{header}\n20,1,7,16\n20,1,7,16\n20,1,7,32\n")
    with pytest.raises(TraceError, match=":4: hash_block_tokens changes to 32"):
        list(stream(path, chunk_rows=chunk_rows))
