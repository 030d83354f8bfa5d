import gzip
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.sim.errors import TraceError
from schedlab.testing import READER_LAWS, check_reader
from schedlab.traces import READERS, Trace, detect_format, read, stream
from schedlab.traces.readers.source import peek
from schedlab.traces.tokenizer import token_counter
from tests.data_folder import data_folder
from tests.golden.files import FILES
from tests.trace_samples import (
    AZURE_2023,
    AZURE_2024,
    BAILIAN,
    BURSTGPT_6,
    BURSTGPT_8,
    MOONCAKE,
    OWN,
    SAMPLES,
    SERVING_SIM_LEAN,
    SHAREGPT,
    VIDUR,
    VIDUR_LENGTHS,
    VLLM_CUSTOM,
)

# Arrival in ns, prompt and output tokens of each row, by hand from the text above.
COLUMNS = [
    (AZURE_2023, [0, 4_314_579_000, 4_314_579_100], [374, 396, 879], [44, 109, 55]),
    (AZURE_2024, [0, 990_070_000, 2_490_070_000], [2162, 2399, 76], [5, 6, 15]),
    (BURSTGPT_6, [0, 40_000_000_000], [472, 1087], [18, 230]),
    (BURSTGPT_8, [0, 2_500_000_000], [906, 10], [446, 20]),
    (MOONCAKE, [0, 3_000_000_000], [600, 512], [5, 7]),
    (BAILIAN, [61_114_000_000, 62_500_000_000, 62_500_000_000], [33, 48, 16], [5, 9, 9]),
    (VIDUR, [0, 4_314_579_000], [374, 396], [44, 109]),
    (VIDUR_LENGTHS, None, [3772], [54]),
    (SERVING_SIM_LEAN, [46_926_808, 46_926_809], [33, 16], [20, 2]),
    # Texts of 16, 17, 14 and 24 bytes, 4.2 of them a token.
    (VLLM_CUSTOM, None, [4, 5], [12, 30]),
    (SHAREGPT, None, [4], [6]),
    (OWN, [1, 3_000_000_000], [20, 30], [5, 6]),
]


@pytest.mark.parametrize(("text", "arrival_ns", "prompt_tokens", "output_tokens"), COLUMNS)
def test_reader_gives_times_and_lengths_of_every_row(
    text, arrival_ns, prompt_tokens, output_tokens, file
):
    trace = read(file(text), tokenizer="estimate")
    assert (None if trace.arrival_ns is None else trace.arrival_ns.tolist()) == arrival_ns
    assert trace.prompt_tokens.tolist() == prompt_tokens
    assert trace.output_tokens.tolist() == output_tokens


def test_times_are_rounded_to_the_nearest_nanosecond(file):
    # In floating point 1.001 s are 1000999999.9999999 ns.
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n1.001,1,1\n1.0010000006,1,1\n"
    assert read(file(text)).arrival_ns.tolist() == [1_001_000_000, 1_001_000_001]


def test_row_earlier_than_the_last_one_of_the_chunk_before_is_refused(file):
    path = file("arrived_at,num_prefill_tokens,num_decode_tokens\n2,1,1\n1.5,1,1\n")
    with pytest.raises(TraceError, match=r":3: arrives 0.5 s before the row above it"):
        list(stream(path, chunk_rows=1))


@pytest.fixture
def file(tmp_path):
    def write(text, name="trace.txt"):
        path = tmp_path / name
        path.write_bytes(text.encode())
        return path

    return write


def test_samples_cover_every_reader():
    assert set(SAMPLES) == set(READERS)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("law", READER_LAWS)
def test_reader_keeps_the_laws_that_outsiders_are_held_to(law, name, file):
    suffix = "csv" if "," in SAMPLES[name].partition("\n")[0] else "jsonl"
    check_reader(READERS[name], file(SAMPLES[name], f"sample.{suffix}"), only=law)


@pytest.mark.parametrize("name", SAMPLES)
def test_detect_format_of_sample_finds_its_reader(name, file):
    assert detect_format(file(SAMPLES[name])) == name


def test_detect_format_of_a_first_record_of_megabytes_reads_it_to_its_end(file):
    told = [{"from": "human", "value": "a" * 5_000_000}, {"from": "gpt", "value": "b"}]
    assert (
        detect_format(file(json.dumps([{"id": "a", "conversations": told}], indent=0)))
        == "sharegpt"
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_reader_conforms_in_report_gzip_and_chunks(name, file, tmp_path):
    path = file(SAMPLES[name])
    whole = read(path, tokenizer="estimate")
    assert whole.report.format == name
    assert whole.report.path == str(path)
    assert whole.report.rows_read == len(whole) + sum(whole.report.rows_dropped.values())
    zipped = tmp_path / "trace.gz"
    zipped.write_bytes(gzip.compress(SAMPLES[name].encode()))
    one_by_one = Trace.concat(list(stream(zipped, chunk_rows=1, tokenizer="estimate")))
    assert one_by_one.report.rows_read == whole.report.rows_read
    assert one_by_one.report.rows_dropped == whole.report.rows_dropped
    for column, values in whole.columns().items():
        other = getattr(one_by_one, column)
        if column in ("prefix", "turns"):
            assert other.rows() == values.rows()
        else:
            np.testing.assert_array_equal(other, values)


@pytest.mark.parametrize("name", FILES)
def test_report_of_whatever_kind_of_file_names_all_of_its_path_and_counts_its_rows(name, tmp_path):
    text, options = FILES[name]
    path = tmp_path / "folder" / ("file.json" if "\n" not in text.strip() else "file.txt")
    path.parent.mkdir()
    path.write_text(text)
    report = read(path, **options).report
    assert report.path == str(path)
    assert report.lines()[0] == f"source: {path} ({report.format})"
    assert report.format in (options.get("format"), detect_format(path))
    pieces = list(stream(path, chunk_rows=1, **options))
    assert {piece.report.path for piece in pieces} == {str(path)}
    assert sum(piece.report.rows_read for piece in pieces) == report.rows_read > 0


def test_azure_2023_with_seven_decimals_is_exact(file):
    trace = read(file(AZURE_2023))
    assert trace.arrival_ns.tolist() == [0, 4_314_579_000, 4_314_579_100]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert trace.report.time_zero == "the first request"


def test_azure_2024_with_zones_and_mixed_precision_is_exact(file):
    assert read(file(AZURE_2024)).arrival_ns.tolist() == [0, 990_070_000, 2_490_070_000]


@pytest.mark.parametrize("wrong", ["4 2023", "4+0x", "4Z0"])
def test_azure_time_with_something_behind_it_is_refused(file, wrong):
    row = f"2023-11-16 18:17:03.979960{wrong},374,44"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    with pytest.raises(TraceError, match=rf"TIMESTAMP is '2023.*{re.escape(wrong)}', expected"):
        read(file(f"{head}\n{row}\n"))
    assert len(read(file(f"{head}\n{row.replace(wrong, '4')}\n"))) == 1


def test_burstgpt_failed_calls_are_dropped_and_counted(file):
    trace = read(file(BURSTGPT_6))
    assert trace.arrival_ns.tolist() == [0, 40_000_000_000]
    assert trace.application.tolist() == ["ChatGPT/Conversation log", "GPT-4/API log"]
    assert trace.report.rows_dropped == {"failed call: 0 tokens": 1}


def test_burstgpt_of_eight_columns_starts_at_the_first_kept_row(file):
    trace = read(file(BURSTGPT_8))
    assert trace.arrival_ns.tolist() == [0, 2_500_000_000]
    assert trace.session.tolist() == ["1722ac82", None]


def test_mooncake_times_are_milliseconds_and_ids_are_kept(file):
    trace = read(file(MOONCAKE))
    assert trace.arrival_ns.tolist() == [0, 3_000_000_000]
    assert trace.prefix.rows() == [(0, 1), (0,)]
    assert trace.prefix.block_tokens == 512


def test_bailian_times_are_seconds_and_blocks_are_chained(file):
    trace = read(file(BAILIAN))
    assert trace.arrival_ns.tolist() == [61_114_000_000, 62_500_000_000, 62_500_000_000]
    assert trace.session.tolist() == ["7", "7", "2"]
    assert trace.application.tolist() == ["text", "search", "text"]
    first, second, third = trace.prefix.rows()
    assert first[0] == second[0]
    # Block 6 is the same content after three different prefixes: three different blocks.
    assert len({first[2], second[2], third[0]}) == 3


def test_bailian_session_is_the_first_chat_however_long_the_conversation(file):
    line = (
        '{"chat_id": %d, "parent_chat_id": %d, "timestamp": 0, "input_length": 8, '
        '"output_length": 1, "type": "text"}'
    )
    chats = [(1, -1), (2, 1), (5, -1), (3, 2), (4, 3)]
    trace = read(file("\n".join(line % chat for chat in chats)))
    assert trace.session.tolist() == ["1", "1", "5", "1", "1"]


def test_mooncake_layout_with_blocks_of_sixteen_is_recognised(file):
    # One id for 10 tokens says nothing; three for 40 do, for the rows before and behind as well.
    rows = [(10, [0]), (40, [0, 1, 2]), (10, [0])]
    line = '{"timestamp": 0, "input_length": %d, "output_length": 5, "hash_ids": %s}'
    path = file("\n".join(line % row for row in rows))
    assert read(path).prefix.block_tokens == 16
    later = file("\n".join(line % row for row in rows[1:]), "later.jsonl")
    assert [chunk.prefix.block_tokens for chunk in stream(later, chunk_rows=1)] == [16, 16]


def test_mooncake_prompt_may_end_in_a_block_without_an_id(file):
    line = '{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1]}'
    assert read(file(line)).prefix.block_tokens == 512


def test_vidur_without_times_gives_lengths_only(file):
    trace = read(file(VIDUR_LENGTHS))
    assert trace.arrival_ns is None
    assert trace.report.time_unit == ""


def test_llmservingsim_lean_keeps_full_prompt_blocks_only(file):
    trace = read(file(SERVING_SIM_LEAN))
    assert trace.prefix.rows() == [(0, 1), (0,)]
    assert trace.arrival_ns[0] == 46_926_808


def test_llmservingsim_full_chains_block_hashes_of_token_ids(file):
    def row(tokens):
        return json.dumps(
            {
                "input_toks": len(tokens),
                "output_toks": 1,
                "arrival_time_ns": 0,
                "input_tok_ids": tokens,
                "output_tok_ids": [1],
            }
        )

    first, second = list(range(32)), list(range(100, 116))
    rows = [[*first, 7], first[:16] + second, second + first[16:]]
    blocks = read(file("\n".join(map(row, rows)))).prefix.rows()
    assert [len(b) for b in blocks] == [2, 2, 2]
    assert blocks[0][0] == blocks[1][0]
    # The same sixteen tokens after other ones are another block.
    assert len({blocks[0][1], blocks[1][1], blocks[2][0], blocks[2][1]}) == 4


def test_sharegpt_takes_first_two_turns_and_counts_the_rest(file):
    trace = read(file(SHAREGPT), tokenizer="estimate")
    assert trace.prompt.tolist() == ["What is M/M/1?"]
    assert trace.report.rows_dropped == {"fewer than two turns": 1, "empty prompt or answer": 1}
    assert trace.report.tokens == "estimated as UTF-8 bytes / 4.2"
    assert trace.prompt_tokens.tolist() == [4]


def test_text_with_half_a_character_is_repaired_and_noted(file):
    trace = read(file('{"prompt": "a\\ud800b", "output_tokens": 3}\n'), tokenizer="estimate")
    assert trace.prompt.tolist() == ["a?b"]
    assert any("half a Unicode character" in note for note in trace.report.notes)
    pair = '[{"conversations": [{"value": "a"}, {"value": "\\ud800"}]}]'
    trace = read(file(pair), tokenizer="estimate")
    assert any("half a Unicode character" in note for note in trace.report.notes)


def test_vllm_custom_without_output_tokens_needs_a_default(file):
    path = file('{"prompt": "one two", "output_tokens": 3}\n{"prompt": "three"}\n')
    with pytest.raises(TraceError, match=r":2: no output_tokens; give default_output_tokens"):
        read(path, tokenizer="estimate")
    trace = read(path, tokenizer="estimate", default_output_tokens=256)
    assert trace.output_tokens.tolist() == [3, 256]
    assert "output_tokens missing in the file: 256 assumed" in trace.report.notes


def test_vllm_custom_with_given_prompt_tokens_needs_no_tokenizer(file):
    path = file('{"prompt": "one two", "prompt_tokens": 99, "output_tokens": 3}\n')
    trace = read(path, tokenizer="not-even-looked-at")
    assert trace.prompt_tokens.tolist() == [99]
    assert trace.report.tokens == "counted by the publisher"


def test_vllm_custom_counts_all_prompts_where_a_length_is_missing(file):
    path = file(
        '{"prompt": "one two", "prompt_tokens": 99, "output_tokens": 3}\n'
        '{"prompt": "three", "output_tokens": 3}\n'
    )
    trace = read(path, tokenizer="estimate")
    assert trace.prompt_tokens.tolist() == [2, 2]
    assert trace.report.tokens == "estimated as UTF-8 bytes / 4.2"


def test_tokenizer_that_is_not_installed_raises_and_auto_names_the_estimate(file, monkeypatch):
    for package in ("tiktoken", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    path = file(VLLM_CUSTOM)
    with pytest.raises(TraceError, match="needs tiktoken"):
        read(path, tokenizer="cl100k_base")
    with pytest.raises(TraceError, match="needs transformers"):
        read(path, tokenizer="some/model")
    assert "estimated as UTF-8 bytes / 4.2" in read(path, tokenizer="auto").report.tokens


def test_own_csv_with_every_column_is_read_exactly(file):
    trace = read(file(OWN))
    assert trace.arrival_ns.tolist() == [1, 3_000_000_000]
    assert trace.prompt_tokens.tolist() == [20, 30]
    assert trace.max_tokens.tolist() == [0, 64]
    assert trace.priority.tolist() == [1, 0]
    assert trace.deadline_s[0] == 2.5
    assert np.isnan(trace.deadline_s[1])
    assert trace.tenant.tolist() == ["acme", None]
    assert trace.session.tolist() == ["s1", None]
    assert trace.prefix.rows() == [(1, 2), ()]


@pytest.mark.parametrize("package", ["tiktoken", "transformers"])
def test_tokens_of_a_prompt_are_counted_without_special_ones(monkeypatch, package):
    class Letters:
        """A token a letter, and two more where special ones are asked for."""

        def __call__(self, texts, add_special_tokens):
            extra = [0, 0] if add_special_tokens else []
            return {"input_ids": [[*map(ord, text), *extra] for text in texts]}

        def encode_ordinary(self, text):
            return [*map(ord, text)]

    stand_in = SimpleNamespace(
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda name: Letters()),
        get_encoding=lambda name: Letters(),
    )
    monkeypatch.setitem(sys.modules, package, stand_in)
    name = "cl100k_base" if package == "tiktoken" else "some/model"
    assert token_counter(name).count_tokens(["abc", "", "de"]) == [3, 0, 2]


def test_own_csv_without_block_size_says_which_it_assumed(file):
    trace = read(file("prompt_tokens,output_tokens,prefix_hash_ids\n40,1,1 2\n"))
    assert trace.prefix.block_tokens == 16
    assert "no column hash_block_tokens: blocks of 16 tokens assumed" in trace.report.notes


def test_own_csv_in_pieces_notes_the_block_size_it_assumed_once(file):
    path = file("prompt_tokens,output_tokens,prefix_hash_ids\n" + "40,1,1 2\n" * 3)
    chunks = list(stream(path, chunk_rows=1))
    assert [chunk.prefix.block_tokens for chunk in chunks] == [16] * 3
    assert chunks[-1].report.notes == ("no column hash_block_tokens: blocks of 16 tokens assumed",)


def test_own_csv_of_blocks_of_one_token_is_read(file):
    header = "prompt_tokens,output_tokens,prefix_hash_ids,hash_block_tokens\n"
    assert read(file(f"{header}2,1,7 8,1\n")).prefix.block_tokens == 1


def test_own_csv_with_foreign_column_notes_it(file):
    trace = read(file("id,prompt_tokens,output_tokens\n7,40,1\n"))
    assert trace.report.notes == ("columns ignored: id",)


def test_rows_dropped_at_the_end_of_a_stream_are_still_reported(file):
    path = file(BURSTGPT_6)
    chunks = list(stream(path, chunk_rows=1))
    assert [len(chunk) for chunk in chunks] == [1, 1]
    assert chunks[-1].report.rows_dropped == {"failed call: 0 tokens": 1}


def test_time_of_epoch_size_keeps_every_nanosecond(file):
    text = "arrival_s,prompt_tokens,output_tokens\n0,1,1\n1700000000.123456789,1,1\n"
    assert read(file(text)).arrival_ns[1] == 1_700_000_000_123_456_789


def test_read_of_rounded_times_warns_and_of_late_start_tells(file):
    rows = "".join(f"{3 * (i // 10) + 7},1,1\n" for i in range(100))
    notes = read(file("arrival_s,prompt_tokens,output_tokens\n" + rows)).report.notes
    assert notes[0] == "first request arrives at 7 s"
    assert notes[1].startswith("91% of the requests arrive at the same instant")


def test_azure_conv_equals_vidur_copy_of_it():
    folder = data_folder() / "traces"
    azure = read(folder / "azure_2023" / "AzureLLMInferenceTrace_conv.csv")
    vidur = read(folder / "vidur" / "splitwise_conv.csv")
    assert len(azure) == 19_366
    np.testing.assert_array_equal(azure.arrival_ns, vidur.arrival_ns)
    np.testing.assert_array_equal(azure.prompt_tokens, vidur.prompt_tokens)
    np.testing.assert_array_equal(azure.output_tokens, vidur.output_tokens)


def test_llmservingsim_full_and_lean_share_the_same_prefixes():
    folder = data_folder() / "vllm_ground_truth" / "workloads"
    full = read(folder / "sharegpt-llama-3.1-8b-300-sps10.first3.jsonl")
    lean = read(folder / "sharegpt-llama-3.1-8b-300-sps10.lean.jsonl")
    assert len(lean) == 300
    assert int(lean.prompt_tokens.sum()) == 257_239
    assert len(lean.prefix.ids) == 15_942
    np.testing.assert_array_equal(full.arrival_ns, lean.arrival_ns[:3])
    start = lean.head(3).prefix
    np.testing.assert_array_equal(full.prefix.offsets, start.offsets)
    pairs = set(zip(full.prefix.ids.tolist(), start.ids.tolist(), strict=True))
    assert len(pairs) == len(set(start.ids.tolist())) == len(set(full.prefix.ids.tolist()))


@pytest.mark.parametrize(
    ("tokens", "num_ids", "block_tokens"),
    [([9], 1, 512), ([513], 2, 512), ([9, 33], 3, 16), ([48], 3, 16), ([40], 2, 16)],
)
def test_mooncake_blocks_are_as_large_as_the_first_row_that_tells_says(
    tokens, num_ids, block_tokens, file
):
    ids = [[*range(1)]] * (len(tokens) - 1) + [[*range(num_ids)]]
    rows = [
        {"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": of}
        for n, of in zip(tokens, ids, strict=True)
    ]
    trace = read(file("".join(json.dumps(row) + "\n" for row in rows)))
    assert trace.prefix.block_tokens == block_tokens


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.json", '{\n "x": 1,\n "y": [2]}\n', ("jsonl", ("x", "y"))),
        ("a.jsonl", '\n{"x": 1}\n{"z": 1}\n', ("jsonl", ("x",))),
        # Lines of JSON under the name of one object, and an object over many lines, zipped or not.
        ("a.json", '{"x": 1}\n{"z": 1}\n', ("jsonl", ("x",))),
        ("a.json.gz", ' {\n"x": 1,\n"w": {}\n}', ("jsonl", ("x", "w"))),
        ("a.json", ' [\n{"x": 1}]', ("json", ("x",))),
        ("a.txt", '{\n "x": 1}\n', "a.txt:1: no complete JSON object"),
        ("a.json", '[{"x": 1, "y": 2}]', ("json", ("x", "y"))),
        ("a.csv", "x, y\n1,2\n", ("csv", ("x", "y"))),
        ("a.jsonl", '{\n "x": 1}\n', "a.jsonl:1: no complete JSON object"),
        ("a.csv", "\n \n", "the file is empty"),
    ],
)
def test_beginning_of_a_file_tells_its_kind_and_the_names_in_it(tmp_path, name, text, found):
    (tmp_path / name).write_text(text)
    if isinstance(found, str):
        with pytest.raises(TraceError, match=found):
            peek(tmp_path / name)
        return
    assert tuple(peek(tmp_path / name)) == found


def test_calls_have_names_of_blocks_only_where_all_of_them_tell_their_tokens(file):
    def call(first, ids=True):
        one = {"input_toks": 32, "output_toks": 16}
        tokens = list(range(first, first + 48))
        return one | ({"input_tok_ids": tokens[:32], "output_tok_ids": tokens[32:]} if ids else {})

    def text(*calls):
        session = {"session_id": "s", "arrival_time_ns": 5, "sub_requests": list(calls)}
        return json.dumps(session) + "\n"

    whole = read(file(text(call(0), call(100))), format="llmservingsim")
    assert [len(ids) for ids in whole.prefix.rows()] == [2, 2]
    assert [len(ids) for ids in whole.turns.answers.rows()] == [1, 1]
    for calls in ((call(0), call(100, False)), (call(0, False), call(100))):
        trace = read(file(text(*calls)), format="llmservingsim")
        assert (trace.prefix, trace.turns.answers) == (None, None)
    for wrong in ("7", 7.0, None, True):
        spoilt = call(0)
        spoilt["input_tok_ids"][31] = wrong
        with pytest.raises(TraceError, match="input_tok_ids must be a list of integers"):
            read(file(text(spoilt)), format="llmservingsim")


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True), (False, False)])
def test_vllm_custom_says_once_more_how_prompts_of_a_later_piece_are_counted(file, given):
    rows = [
        {"prompt": "one two", "output_tokens": 3} | ({"prompt_tokens": 9} if known else {})
        for known in given
    ]
    path = file("".join(json.dumps(row) + "\n" for row in rows))
    words = {True: "counted by the publisher", False: "estimated as UTF-8 bytes / 4.2"}
    pieces = list(stream(path, tokenizer="estimate", chunk_rows=1))
    report = pieces[-1].report
    assert report.tokens == words[given[0]]
    told = [note for note in report.notes if note.startswith("some prompts")]
    assert told == ([f"some prompts {words[given[1]]}"] if given[0] is not given[1] else [])
