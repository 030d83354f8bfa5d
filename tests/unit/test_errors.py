import pytest

from schedlab.sim.errors import MAX_LISTED, SpecError, look_alike, nearest
from schedlab.sim.files import parse_json, read_json_object


@pytest.mark.parametrize(
    ("word", "choices", "message"),
    [
        ("fcsf", ["sjf", "fcfs"], "did you mean fcfs?"),
        ("FCFS", ["sjf", "fcfs"], "did you mean fcfs?"),
        ("bf16", ["BF16", "FP8"], "did you mean BF16?"),
        ("lottery", ["sjf", "fcfs"], "choose from fcfs, sjf"),
        (7, ["sjf", "fcfs"], "choose from fcfs, sjf"),
        ("lottery", [], "there are none"),
    ],
)
def test_nearest_names_a_look_alike_or_all_choices(word, choices, message):
    assert nearest(word, iter(choices)) == message


def test_nearest_among_many_lists_none_but_still_finds_a_look_alike():
    names = [f"column_{i}" for i in range(MAX_LISTED + 1)]
    assert nearest("xyz", names) == f"none of the {len(names)} names there are is like it"
    assert nearest("colunm_40", names) == "did you mean column_40?"


def test_look_alike_below_the_cutoff_is_none():
    assert look_alike("promt", ["prompt_tokens"], cutoff=0.75) is None
    assert look_alike("promt_tokens", ["prompt_tokens"], cutoff=0.75) == "prompt_tokens"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{", "not valid JSON: Expecting"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[" * 100_000, "not valid JSON: nested too deeply"),
        (b"[1]", "must hold a JSON object"),
    ],
)
def test_read_json_object_on_a_bad_file_names_it_and_the_fault(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=rf"config\.json(:1)?: {message}"):
        read_json_object(path)


def test_json_holds_every_whole_number_of_64_bits_and_no_other():
    least, most = -(2**63), 2**63 - 1
    assert parse_json(f"[{least}, {most}]", "a.json") == [least, most]
    for beyond in (least - 1, most + 1):
        with pytest.raises(SpecError, match=f"the integer {beyond} does not fit 64 bits"):
            parse_json(f"[{beyond}]", "a.json")
