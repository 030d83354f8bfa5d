import csv
import json
import logging
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from schedlab.sim.cost.importers import aiconfigurator
from schedlab.sim.cost.importers.aiconfigurator import (
    ColdCache,
    NarrowAttention,
    import_aiconfigurator,
    step_grid,
)
from schedlab.sim.cost.importers.csv_table import medians, read_csv
from schedlab.sim.cost.importers.llmservingsim import (
    Options,
    _attention,
    import_bundle,
    read_link,
)
from schedlab.sim.cost.importers.splitwise import import_splitwise
from schedlab.sim.cost.importers.vidur import import_vidur
from schedlab.sim.cost.registry import load_profile
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.table import TableCostModel
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.model_config import read_config
from schedlab.sim.hardware.models import model
from tests.data_folder import data_folder

LAYERS = {
    "prologue": ["embedding"],
    "pre_attn": ["layernorm", "qkv_proj", "qk_norm", "attention"],
    "post_attn": ["o_proj", "layernorm"],
    "mlp_dense": ["down_proj"],
    "mlp_moe": ["moe"],
    "head": ["lm_head"],
}
TIMES = {"embedding": 1, "layernorm": 2, "qkv_proj": 3, "qk_norm": 4, "o_proj": 5, "down_proj": 6}
CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 10, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 1000,
    "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip


def write_csv(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def bundle(root, config=None, meta=None, layers=None, tp=1):
    """Write a bundle whose layers take TIMES at 1 token and as much again at 101."""
    folder = root / "perf/RTX4090/Qwen/tiny/bf16"
    meta = {"hardware": "RTX4090", "model": "Qwen/tiny", "architecture": "qwen3"} | (meta or {})
    folder.mkdir(parents=True)
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta))
    configs = root / "model_configs"
    (configs / "Qwen").mkdir(parents=True)
    (configs / "Qwen/tiny.json").write_text(json.dumps(CONFIG | (config or {})))
    text = yaml.safe_dump(layers or {"sequence": LAYERS})
    (configs / "qwen3.architecture.yaml").write_text(text)
    tables = folder / f"tp{tp}"
    dense = [(name, t, us * (1 + t // 101)) for name, us in TIMES.items() for t in (1, 101)]
    write_csv(tables / "dense.csv", ["layer", "tokens", "time_us"], dense)
    write_csv(tables / "per_sequence.csv", ["layer", "sequences", "time_us"], [("lm_head", 1, 7)])
    write_csv(
        tables / "attention.csv",
        ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"],
        [(0, 0, 1, 16, 20), (0, 0, 1, 1024, 20), (16, 0, 0, 0, 20)],
    )
    return folder


def step_us(path, tmp_path, options=None, shape=None):
    imported = import_bundle(path, options or Options())
    imported.save(tmp_path / "out")
    shape = shape or BatchShape(1, 50, 50, rows_sampled=1, decode_context_min_tokens=50)
    return load_profile(tmp_path / "out").step_ns(shape)[0] / 1000, imported


def test_points_of_one_key_are_worth_their_median():
    assert medians([(2.0, 5.0), (1.0, 9.0), (1.0, 4.0), (1.0, 2.0)]) == ((1.0, 2.0), (4.0, 5.0))


def test_layers_of_the_list_are_added_up_with_qk_norm(tmp_path):
    us, imported = step_us(bundle(tmp_path), tmp_path)
    # Ten layers: two norms, qkv, qk_norm, attention, o, down; embedding and head once.
    assert us == 1 + 10 * (2 * 2 + 3 + 4 + 20 + 5 + 6) + 7
    assert imported.meta["layers"]["layernorm"] == 20
    assert imported.meta["model"] == "tiny"


def test_profile_of_which_no_error_was_published_claims_none(tmp_path):
    imported = import_bundle(bundle(tmp_path), Options())
    assert "published_error" not in imported.meta
    imported.save(tmp_path / "out")
    assert load_profile(tmp_path / "out").describe()["published_error"] == "none published"


def test_newer_form_of_the_layer_list_is_understood(tmp_path):
    parts = {key: LAYERS[key] for key in ("pre_attn", "post_attn")}
    newer = {
        "blocks": {"attn": {"full_attention": parts}, "mlp": {"dense": ["down_proj"]}},
        "shared": {key: LAYERS[key] for key in ("prologue", "head")},
    }
    assert step_us(bundle(tmp_path, layers=newer), tmp_path)[0] == 1 + 10 * 42 + 7


def test_layer_list_is_found_under_both_of_its_names_and_where_it_is_given(tmp_path):
    path = bundle(tmp_path)
    expected, _ = step_us(path, tmp_path)
    older = tmp_path / "model_configs/qwen3.architecture.yaml"
    (tmp_path / "models").mkdir()
    newer = older.rename(tmp_path / "models/qwen3.yaml")
    assert step_us(path, tmp_path)[0] == expected
    given = newer.rename(tmp_path / "elsewhere.yaml")
    assert step_us(path, tmp_path, Options(architecture=given))[0] == expected
    with pytest.raises(SpecError, match="no layer list of architecture 'qwen3' near the bundle"):
        import_bundle(path, Options())


@pytest.mark.filterwarnings("ignore:.*outside the measured range")
def test_newer_attention_table_is_read_by_the_key_length_of_prefills(tmp_path):
    path = bundle(tmp_path)
    prompts = [("attention", q, key, 0, 0, 1, 1 + key) for q in (16, 32) for key in (8, 512)]
    decodes = [("attention", 0, 0, 1, 16, 1, 20)]
    other = [("indexer", 16, 8, 0, 0, 1, 999), ("attention", 16, 8, 1, 16, 4, 999)]
    header = ["layer", "prefill_tokens", "prefill_key", "n_decode", "kv_decode", "decode_q_len"]
    write_csv(path / "tp1/attention.csv", [*header, "time_us"], [*other, *decodes, *prompts])

    def us(*chunks):
        return step_us(path, tmp_path, shape=BatchShape(0, 0, 0, chunks, rows_sampled=1))[0]

    # Key lengths 100 + 8 and 0 + 8 have the mean 58, as 32 tokens after 42 have: 58 = 42 + 16.
    assert us((16, 100), (16, 0)) == pytest.approx(us((32, 42)))
    assert us((32, 60)) - us((32, 42)) == pytest.approx(10 * 18), "ten layers, 18 keys more"


def test_attention_table_is_of_plain_attention_and_of_decodes_of_a_token(tmp_path):
    header = ["layer", "prefill_tokens", "prefill_key", "n_decode", "kv_decode", "decode_q_len"]
    rows = [
        ("attention", 1, 1.5, 0, 0, 0, 10.5), ("mla_attention", 4, 2.5, 5, 6, 1, 20.5),
        ("attn", 4, 2.5, 5, 6, 1, 20.5), ("attention", 0, 0, 8, 9, 1, 30.5),
        ("attention", 7, 3.5, 8, 9, 1, 40.5), ("attention", 10, 4.5, 11, 12, 2, 50.5),
    ]  # fmt: skip
    write_csv(tmp_path / "attention.csv", [*header, "time_us"], rows)
    assert _attention(tmp_path) == {
        "prefill_chunk": [1, 0, 7], "prefill_key": [1.5, 0, 3.5], "num_decodes": [0, 8, 8],
        "kv_decode": [0, 9, 9], "us": [10.5, 30.5, 40.5],
    }  # fmt: skip
    both = ["prefill_chunk", "kv_prefill", "prefill_tokens", "prefill_key", "n_decode", "kv_decode"]
    mixed = [(1, 2, 3, 4.5, 0, 0, 7.5), (1, 2, 0, 0, 5, 6, 8.5)]
    write_csv(tmp_path / "attention.csv", [*both, "time_us"], mixed)
    assert _attention(tmp_path) == {
        "prefill_chunk": [3, 0], "prefill_key": [4.5, 0], "num_decodes": [0, 5],
        "kv_decode": [0, 6], "us": [7.5, 8.5],
    }  # fmt: skip
    older = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    write_csv(tmp_path / "attention.csv", older, [(1, 2, 0, 0, 5.5), (0, 0, 8, 9, 10.5)])
    assert _attention(tmp_path) == {
        "prefill_chunk": [1, 0], "kv_prefill": [2, 0], "num_decodes": [0, 8],
        "kv_decode": [0, 9], "us": [5.5, 10.5],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("0,0,1,16,800", r"csv:5: prefill_chunk 0, kv_prefill 0, num_decodes 1, kv_decode 16 is"),
        ("0,0,1,16,20", r"csv:5: .* is there twice"),
        ("0,0,1,32,0", r"csv:5: time_us must be above 0"),
    ],
)
def test_attention_row_that_contradicts_another_or_takes_no_time_is_refused(tmp_path, more, told):
    path = bundle(tmp_path)
    with (path / "tp1/attention.csv").open("a") as file:
        file.write(more + "\n")
    with pytest.raises(SpecError, match=told):
        import_bundle(path, Options())


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([(0, 0, 1, 16, 20), (0, 0, 2, 16, 20)], "no row of attention to prefills alone"),
        ([(0, 0, 1, 16, 20), (16, 0, 2, 16, 20)], "no row of attention to prefills alone"),
        ([(16, 0, 0, 0, 20), (16, 0, 2, 16, 20)], "no row of attention to decodes alone"),
    ],
)
def test_attention_table_without_one_of_the_kinds_of_steps_is_refused(tmp_path, rows, told):
    path = bundle(tmp_path)
    header = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    write_csv(path / "tp1/attention.csv", header, rows)
    with pytest.raises(SpecError, match=f"attention.csv: {told}"):
        import_bundle(path, Options())
    write_csv(path / "tp1/attention.csv", [*header, "layer"], [(*rows[0], "mla_attention")])
    with pytest.raises(SpecError, match=r"attention\.csv: no row of attention"):
        import_bundle(path, Options())


@pytest.mark.parametrize(
    ("name", "key", "row"),
    [("dense", "tokens", "act_fn,1,2"), ("per_sequence", "sequences", "lm_head,1,7")],
)
def test_layer_measured_twice_at_one_size_is_refused_with_file_and_line(tmp_path, name, key, row):
    path = bundle(tmp_path)
    with (path / f"tp1/{name}.csv").open("a") as file:
        file.write(f"{row}\n{row}\n")
    layer = row.partition(",")[0]
    with pytest.raises(SpecError, match=rf"{name}\.csv:\d+: layer '{layer}' at {key} 1 is there"):
        import_bundle(path, Options())


def test_experts_measured_twice_at_one_size_are_refused_with_file_and_line(tmp_path):
    path = bundle(tmp_path, config=EXPERTS)
    rows = [(t, e, 10) for t in (1, 8) for e in (2, 8)]
    write_csv(path / "tp1/moe.csv", ["tokens", "activated_experts", "time_us"], [*rows, (8, 2, 99)])
    with pytest.raises(
        SpecError, match=r"moe\.csv:6: tokens 8, activated_experts 2 is there twice"
    ):
        import_bundle(path, Options())


NO_MLP = {part: names for part, names in LAYERS.items() if part != "mlp_dense"}
ATTENTION = {"attn": {"full": {"pre_attn": ["attention"]}}}


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ({"sequence": ["a"]}, r"yaml:\d+: sequence must be a mapping, got \['a'\]"),
        ({"sequence": "text"}, "sequence must be a mapping"),
        ({"sequence": None}, "the layer list has no prologue, which tiny needs"),
        ({"sequence": {**LAYERS, "prologue": 3}}, r"sequence\.prologue must be a list of names"),
        ({"sequence": {**LAYERS, "prologue": [["a"]]}}, r"prologue must be a list of names"),
        ({"sequence": {**LAYERS, "prologue": [1]}}, r"prologue must be a list of names"),
        ({"sequence": {**LAYERS, "prologue": [None]}}, r"prologue must be a list of names"),
        ({"sequence": {**LAYERS, "prologue": None}}, "yaml: the layer list has no prologue"),
        ({"sequence": {**LAYERS, "post_attn": []}}, "the layer list has no post_attn"),
        ({"sequence": {**LAYERS, "pre_attn": ["layernorm"]}}, r"yaml: the layer list has no atten"),
        ({"sequence": NO_MLP}, "the layer list has no mlp_dense, which tiny needs"),
        ({"sequence": {**LAYERS, 1: ["a"]}}, "unknown part '1'"),
        ({"blocks": None}, "0 kinds of attention"),
        ({"blocks": [1]}, "blocks must be a mapping"),
        ({"blocks": {"attn": ["a"]}}, r"blocks\.attn must be a mapping"),
        ({"blocks": {"attn": "text"}}, r"blocks\.attn must be a mapping"),
        ({"blocks": {"attn": None}}, "0 kinds of attention"),
        ({"blocks": {"attn": {1: {}, 2: {}}}}, r"2 kinds of attention \(1, 2\)"),
        ({"blocks": {"attn": {"full": "x"}}}, r"blocks\.attn\.full must be a mapping"),
        ({"blocks": {"attn": {"full": None}}}, "the layer list has no prologue"),
        ({"blocks": {**ATTENTION, "mlp": [1]}}, r"blocks\.mlp must be a mapping"),
        ({"blocks": {**ATTENTION, "mlp": {"dense": 3}}}, r"mlp\.dense must be a list of names"),
        ({"blocks": ATTENTION, "shared": "x"}, "shared must be a mapping"),
        ([1], "must hold a mapping"),
    ],
)
def test_malformed_layer_list_is_refused_with_file_and_key(tmp_path, layers, told):
    path = bundle(tmp_path, layers=layers)
    with pytest.raises(SpecError, match=rf"qwen3\.architecture\.yaml.*{told.removeprefix('yaml')}"):
        import_bundle(path, Options())


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("skew_fit", "yes", r"yaml:\d+: skew_fit must be a mapping, got 'yes'"),
        ("skew_fit", {"enabled": "false"}, r"skew_fit\.enabled must be true or false"),
        ("skew_fit", {"enabled": 1}, r"skew_fit\.enabled must be true or false"),
        ("gpu", float("nan"), "gpu must be a text, got nan"),
        ("gpu", ["a"], "gpu must be a text"),
        ("vllm_version", {"a": 1}, "vllm_version must be a text"),
        ("profiled_at", True, "profiled_at must be a text"),
        ("hardware", ["RTX4090"], "hardware must be a text"),
        ("model", ["a"], "model must be a text"),
        ("variant", ["a"], "variant must be a text"),
        ("variant", "foo-kv", "variant begins with no format: dtype 'foo' is unknown"),
        ("architecture", ["a"], "architecture must be a text"),
    ],
)
def test_malformed_description_of_a_bundle_is_refused_with_file_and_key(tmp_path, key, value, told):
    with pytest.raises(SpecError, match=f"meta.yaml.*{told.removeprefix('yaml')}"):
        import_bundle(bundle(tmp_path, meta={key: value}), Options())


def test_description_of_a_bundle_may_leave_out_what_is_only_told(tmp_path):
    meta = {"variant": None, "gpu": None, "vllm_version": 0.19, "skew_fit": None}
    found = import_bundle(bundle(tmp_path, meta=meta), Options()).meta
    assert (found["dtype"], found["gpu"], found["vllm_version"]) == ("bf16", None, "0.19")
    assert found["profiled_at"] == ""


def test_tensor_parallel_bundle_adds_all_reduces_and_says_so(tmp_path):
    options = Options(tensor_parallel_size=2, link_latency_s=5e-6, link_bytes_per_s=1e9)
    us, imported = step_us(bundle(tmp_path, tp=2), tmp_path, options)
    # Behind o_proj and down_proj of ten layers: 5 us and 2 * 1/2 * 1 * 64 * 2 bytes at 1 GB/s.
    assert us == pytest.approx(1 + 10 * 42 + 7 + 20 * (5 + 0.128), abs=1e-3)
    assert any("all-reduces behind o_proj and down_proj" in line for line in imported.assumptions)


ALL_REDUCES = [(2, 128, 3), (2, 1280, 4), (2, 12800, 40), (4, 128, 99)]  # workers, bytes, us


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        (["num_workers", "size_bytes", "time_us"], ALL_REDUCES),
        (
            ["num_workers", "size", "devices_per_node", "time_stats.all_reduce.median"],
            [(n, size, n, us / 1e3) for n, size, us in ALL_REDUCES] + [(2, 128, 1, 9)],
        ),
    ],
)
def test_measured_all_reduces_take_the_place_of_the_ring(tmp_path, header, rows):
    write_csv(tmp_path / "all_reduce.csv", header, rows)
    options = Options(tensor_parallel_size=2, all_reduce=tmp_path / "all_reduce.csv")
    path = bundle(tmp_path, tp=2)
    us, imported = step_us(path, tmp_path, options)
    assert us == pytest.approx(1 + 10 * 42 + 7 + 20 * 3, abs=1e-3)  # 128 bytes are one token
    assert imported.profile.all_reduce is None
    curve = imported.profile.by_tokens[-1]
    assert (curve.name, curve.calls) == ("all_reduce", 20)
    assert (curve.at, curve.us) == ((1.0, 10.0, 100.0), (3.0, 4.0, 40.0))
    told = " ".join(imported.assumptions)
    assert "all-reduces as measured for 2 workers" in told
    assert "a ring at" not in told


@pytest.mark.parametrize(
    ("workers", "text", "told"),
    [
        (1, "num_workers,size_bytes,time_us\n2,128,3\n", "--all-reduce needs several devices"),
        (2, "num_workers,size_bytes,time_us\n4,128,3\n", "no all-reduce of 2 workers"),
        (2, "num_workers,bytes,time_us\n2,128,3\n", "no column 'size_bytes'"),
        (2, "num_workers,size_bytes,time_us\n2,0,3\n", "csv:2: size_bytes must be at least 1"),
        (2, "num_workers,size_bytes,time_us\n2,128,3\n2,0,3\n", "csv:3: size_bytes must be"),
        (2, "num_workers,size_bytes,time_us\n2,128,-3\n", "csv:2: time_us must be at least 0"),
    ],
)
def test_unusable_table_of_all_reduces_is_refused(tmp_path, workers, text, told):
    (tmp_path / "all_reduce.csv").write_text(text)
    options = Options(tensor_parallel_size=workers, all_reduce=tmp_path / "all_reduce.csv")
    with pytest.raises(SpecError, match=told):
        import_bundle(bundle(tmp_path, tp=workers), options)


def test_experts_cost_by_the_number_that_tokens_touch(tmp_path):
    path = bundle(tmp_path, config=EXPERTS)
    rows = [(t, e, 10 * e + t) for t in (1, 8) for e in (2, 8)]
    write_csv(path / "tp1/moe.csv", ["tokens", "activated_experts", "time_us"], rows)
    us, imported = step_us(path, tmp_path)
    # One token touches exactly 2 of 8 experts: 21 us instead of the dense MLP's 6.
    assert us == pytest.approx(1 + 10 * (42 - 6 + 21) + 7, abs=1e-3)
    assert [line for line in imported.assumptions if "experts" in line] == [
        "experts are chosen uniformly and independently, so T tokens touch E*(1-(1-k/E)^T) of them"
    ]


def test_experts_measured_in_slices_compute_the_tokens_of_both_engines(tmp_path):
    path = bundle(tmp_path, config=EXPERTS)
    # A slice of ep 2 was measured with half the experts and half the choices of each token.
    rows = [(ep, t, e, 100 * ep + t) for ep in (1, 2) for t in (1, 8) for e in (1, 4)]
    header = ["ep", "tokens", "activated_experts", "time_us"]
    write_csv(path / "tp1/moe.csv", header, rows)
    options = Options(
        data_parallel_size=2, expert_parallel=True, link_latency_s=1e-6, link_bytes_per_s=1e9
    )
    shape = BatchShape(1, 50, 50, rows_sampled=1, decode_context_min_tokens=50, gathered_tokens=4)
    us, imported = step_us(path, tmp_path, options, shape)
    # 4 tokens of two engines: 204 us; exchange: twice 1 us and 1/2 * 4 * 64 * 2 bytes at 1 GB/s.
    assert us == pytest.approx(1 + 10 * (42 - 6 + 204 + 2 * 1.256) + 7, abs=1e-3)
    assert any("the 2 engines exchange tokens" in line for line in imported.assumptions)


def moe_table(tokens, experts):
    """Return the microseconds of a whole mixture, which no line goes through."""
    return 3 * experts + tokens + tokens * experts / 8


def experts_curve(tmp_path, degrees=(1,), **options):
    path = bundle(tmp_path, config=EXPERTS, tp=options.get("tensor_parallel_size", 1))
    rows = [
        (d, t, e, moe_table(t / d, e))
        for d in degrees
        for t in (d, 16 * d, 64 * d, 2048 * d)
        for e in (1, 2, 4, 8)
        if e <= 8 // d
    ]
    write_csv(path / "tp1/moe.csv", ["ep", "tokens", "activated_experts", "time_us"], rows)
    imported = import_bundle(path, Options(**options))
    return next(c for c in imported.profile.by_tokens if c.name == "moe"), imported


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"data_parallel_size": 2, "expert_parallel": True}, 2),
        ({"data_parallel_size": 4, "expert_parallel": True}, 4),
        ({"tensor_parallel_size": 2, "expert_parallel": True}, 2),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel": True}, 4),
    ],
)
@pytest.mark.parametrize("degrees", [(1,), (1, 2), (2,)])
def test_device_of_n_computes_its_share_of_tokens_and_experts(tmp_path, degrees, options, shares):
    curve, _ = experts_curve(tmp_path, degrees, **options)
    for tokens in (64 * shares, 2048 * shares):  # so many touch every expert
        if tokens <= curve.at[-1]:
            expected = moe_table(tokens / shares, 8 / shares)
            assert curve.us[curve.at.index(tokens)] == pytest.approx(expected, rel=1e-4)
    assert curve.at[-1] == 2048 * shares, "as many as devices of that many tokens each can gather"


def test_experts_are_read_from_the_folder_of_the_devices_where_none_measured_them_alone(tmp_path):
    path = bundle(tmp_path, config=EXPERTS, tp=2)
    header = ["tokens", "activated_experts", "time_us"]
    rows = [(t, e, moe_table(t, e)) for t in (1, 64, 2048) for e in (1, 2, 4, 8)]
    options = Options(tensor_parallel_size=2)
    with pytest.raises(SpecError, match=r"tp2/moe.csv: cannot read"):
        import_bundle(path, options)
    write_csv(path / "tp2/moe.csv", header, rows)
    alone = [c for c in import_bundle(path, options).profile.by_tokens if c.name == "moe"]
    assert len(alone) == 1
    # Where one device measured them, that is what counts.
    write_csv(path / "tp1/moe.csv", header, [(t, e, 3 * us) for t, e, us in rows])
    (both,) = [c for c in import_bundle(path, options).profile.by_tokens if c.name == "moe"]
    assert both.us == pytest.approx([3 * us for us in alone[0].us])


def test_profile_says_how_many_engines_share_its_experts(tmp_path):
    sharing = {"data_parallel_size": 2, "expert_parallel": True}
    _, imported = experts_curve(tmp_path, **sharing)
    assert {key: imported.meta[key] for key in sharing} == sharing


def test_experts_split_by_width_are_priced_by_their_share_and_that_is_said(tmp_path):
    curve, imported = experts_curve(tmp_path, tensor_parallel_size=2)
    assert curve.us[curve.at.index(128)] == pytest.approx(moe_table(64, 4), rel=1e-4)
    assert not curve.shared
    assert any("1/2 of their full width" in line for line in imported.assumptions)


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        (EXPERTS, {"data_parallel_size": 2}, "--data-parallel-size 2 needs --expert-parallel"),
        ({}, {"data_parallel_size": 2}, "tiny has no experts"),
        ({}, {"expert_parallel": True}, "tiny has no experts"),
    ],
)
def test_sharing_that_means_nothing_is_refused(tmp_path, config, options, told):
    path = bundle(tmp_path, config=config)
    write_csv(path / "tp1/moe.csv", ["tokens", "activated_experts", "time_us"], [(1, 2, 3)])
    with pytest.raises(SpecError, match=told):
        import_bundle(path, Options(**options))


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (lambda p: (p / "tp1/dense.csv").unlink(), "dense.csv: cannot read"),
        (lambda p: (p / "tp1/attention.csv").write_text("a,b\n1,2\n"), "no column 'n_decode'"),
        (
            lambda p: (p / "tp1/dense.csv").write_text("layer,tokens,time_us\nlayernrom,1,x\n"),
            "dense.csv:2: time_us must be a number, got 'x'",
        ),
        (
            lambda p: (p / "tp1/dense.csv").write_text("layer,tokens,time_us\nembeding,1,3\n"),
            "no timings of layer 'embedding'; did you mean embeding",
        ),
        (lambda p: (p / "meta.yaml").write_text("hardware: x\n"), "key 'model' is missing"),
        (
            lambda p: (p / "meta.yaml").write_text("hardware: x\nmodel: llama-3-8b\n"),
            "no layer list of architecture 'None'",
        ),
        (lambda p: (p / "meta.yaml").write_text("- 1\n"), "must hold a mapping"),
    ],
)
def test_broken_bundle_is_refused_with_file_and_line(tmp_path, breaks, told):
    path = bundle(tmp_path)
    breaks(path)
    with pytest.raises(SpecError, match=told):
        import_bundle(path, Options())


def test_missing_tensor_parallel_size_lists_those_there_are(tmp_path):
    with pytest.raises(SpecError, match="no folder tp4; there are tp1"):
        import_bundle(bundle(tmp_path), Options(tensor_parallel_size=4))


def test_link_of_a_cluster_is_read_in_its_units(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"link_bw": 16, "link_latency": 20000}))
    assert read_link(path) == (pytest.approx(20e-6), 16e9)
    path.write_text(json.dumps({"link_bw": 16}))
    with pytest.raises(SpecError, match="link_latency must be a positive number"):
        read_link(path)
    for key in ("link_bw", "link_latency"):
        for value in (0, -1, True, "16", None):
            path.write_text(json.dumps({"link_bw": 16, "link_latency": 20000, key: value}))
            with pytest.raises(SpecError, match=f"{key} must be a positive number, got {value!r}"):
                read_link(path)


def test_skew_is_left_out_where_meta_disables_it_and_says_so(tmp_path):
    path = bundle(tmp_path, meta={"skew_fit": {"enabled": False}})
    write_csv(path / "tp1/skew_fit.csv", ["pc", "alpha"], [(0, 0.5)])
    imported = import_bundle(path, Options())
    assert imported.profile.skew is None
    assert any("left unused" in line for line in imported.assumptions)


def test_unknown_version_of_skew_is_refused_with_a_way_out(tmp_path):
    fit = {"enabled": True, "bucket_axes": {"n_bins": [0, 2], "lev_bins": [0, 1]}}
    path = bundle(tmp_path, meta={"skew_fit": fit})
    with pytest.raises(SpecError, match=r"no skew_rate_bins.*--no-skew"):
        import_bundle(path, Options())
    assert import_bundle(path, Options(use_skew=False)).profile.skew is None


SKEW_AXES = ("n", "skew_rate", "kv_big", "kp")


@pytest.mark.parametrize(
    ("per_tp", "default"),
    [
        ({1: {"alpha_default": 0.25}, 2: {"alpha_default": 0.75}}, 0.25),
        ({"1": {"alpha_default": 0.5}}, 0.5),
        ({2: {"alpha_default": 0.75}}, 0.0),
        ({1: {}}, 0.0),
        ({1: None}, 0.0),
        (None, 0.0),
    ],
)
def test_skew_of_steps_that_were_not_fitted_is_that_of_as_many_gpus_or_none(
    tmp_path, per_tp, default
):
    axes = {f"{name}_bins": [0, i + 2, 10 * (i + 2)] for i, name in enumerate(SKEW_AXES)}
    axes |= {f"{name}_labels": ["few", "many"] for name in SKEW_AXES}
    fit = {"enabled": True, "bucket_axes": axes, "per_tp": per_tp}
    path = bundle(tmp_path, meta={"skew_fit": fit})
    header = ["pc", "alpha", *(f"{name}_label" for name in SKEW_AXES)]
    rows = [(0, 0.1, "few", "many", "few", "few"), (64, 0.2, "many", "few", "few", "many"),
            (7, "nan", "few", "few", "few", "few")]  # fmt: skip
    write_csv(path / "tp1/skew_fit.csv", header, rows)
    skew = import_bundle(path, Options()).profile.skew
    assert skew.default == default
    assert skew.cells == {(0, 0, 1, 0, 0): 0.1, (64, 1, 0, 0, 1): 0.2}
    bounds = (skew.decode_bins, skew.rate_bins, skew.context_bins, skew.kv_bins)
    assert bounds == ((2, 20), (3, 30), (4, 40), (5, 50))
    assert skew.alpha(0, 5, 2, 30, 4) == 0.1
    assert skew.alpha(0, 6, 2, 30, 4) == skew.alpha(7, 0, 0, 0, 0) == default
    assert import_bundle(path, Options(use_skew=True)).profile.skew == skew
    assert import_bundle(path, Options(use_skew=False)).profile.skew is None
    other = bundle(tmp_path / "other", meta={"skew_fit": {**fit, "enabled": False}})
    write_csv(other / "tp1/skew_fit.csv", header, rows)
    for asked, found in ((None, None), (False, None), (True, skew)):
        assert import_bundle(other, Options(use_skew=asked)).profile.skew == found
    write_csv(path / "tp1/skew_fit.csv", header, [(0, 0.1, "few", "many", "some", "few")])
    with pytest.raises(SpecError, match=r"skew_fit.csv:2: label 'some' is not in meta.yaml"):
        import_bundle(path, Options())


@pytest.mark.parametrize("gone", ["n", "skew_rate", "kv_big", "kp"])
def test_skew_without_one_of_its_axes_is_refused_by_that_name(tmp_path, gone):
    axes = {f"{name}_bins": [0, 1] for name in ("n", "skew_rate", "kv_big", "kp") if name != gone}
    path = bundle(tmp_path, meta={"skew_fit": {"enabled": True, "bucket_axes": axes}})
    with pytest.raises(SpecError, match=rf"bucket_axes has no {gone}_bins: .*--no-skew"):
        import_bundle(path, Options())


def skewed_bundle(root, rows=((0, 0.1, "few", "few", "few", "few"),), per_tp=None, **axes):
    known = {f"{name}_bins": [0, 2, 20] for name in SKEW_AXES}
    known |= {f"{name}_labels": ["few", "many"] for name in SKEW_AXES}
    fit = {"enabled": True, "bucket_axes": known | axes, "per_tp": per_tp}
    path = bundle(root, meta={"skew_fit": fit})
    header = ["pc", "alpha", *(f"{name}_label" for name in SKEW_AXES)]
    write_csv(path / "tp1/skew_fit.csv", header, rows)
    return path


@pytest.mark.parametrize(
    "bins",
    [None, 5, "abc", {"a": 1}, [], [1], [3, 2, 1], [1, 1, 2], [1, None, 3], ["a", "b", "c"],
     [0, 1, float("nan")]],
)  # fmt: skip
def test_skew_bins_that_do_not_rise_are_refused_with_file_and_key(tmp_path, bins):
    told = (
        r"meta\.yaml:\d+: skew_fit\.bucket_axes\.kv_big_bins must be a list of two or more rising"
    )
    with pytest.raises(SpecError, match=told):
        import_bundle(skewed_bundle(tmp_path, kv_big_bins=bins), Options())


@pytest.mark.parametrize("labels", [None, 5, "few", ["few"], ["few", "few"], ["a", "b", "c"]])
def test_skew_labels_that_are_not_one_a_bucket_are_refused_with_file_and_key(tmp_path, labels):
    with pytest.raises(SpecError, match=r"meta\.yaml:\d+: skew_fit\.bucket_axes\.n_labels must be"):
        import_bundle(skewed_bundle(tmp_path, n_labels=labels), Options())


@pytest.mark.parametrize(
    ("per_tp", "told"),
    [
        (5, r"skew_fit\.per_tp must be a mapping"),
        (["a", "b"], r"skew_fit\.per_tp must be a mapping"),
        ("abc", r"skew_fit\.per_tp must be a mapping"),
        ({1: "abc"}, r"skew_fit\.per_tp\.1 must be a mapping"),
        ({1: {"alpha_default": [1]}}, r"alpha_default must be a number, got \[1\]"),
        ({1: {"alpha_default": "abc"}}, "alpha_default must be a number"),
        ({1: {"alpha_default": float("nan")}}, "alpha_default must be a number"),
    ],
)
def test_malformed_skew_of_other_steps_is_refused_with_file_and_key(tmp_path, per_tp, told):
    with pytest.raises(SpecError, match=rf"meta\.yaml:\d+: .*{told}"):
        import_bundle(skewed_bundle(tmp_path, per_tp=per_tp), Options())


@pytest.mark.parametrize("alpha", [0.1, 0.7, "nan"])
def test_skew_bucket_that_is_there_twice_is_refused_with_file_and_line(tmp_path, alpha):
    bucket = ("few", "many", "few", "few")
    path = skewed_bundle(
        tmp_path, rows=[(0, 0.1, *bucket), (16, 0.1, *bucket), (0, alpha, *bucket)]
    )
    with pytest.raises(SpecError, match=r"skew_fit\.csv:4: pc 0 with few, many, few, few is there"):
        import_bundle(path, Options())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "tp", "has_skew"),
    [("RTX4090", 1, False), ("RTXPRO6000", 1, True), ("RTXPRO6000", 2, True)],
)
def test_published_bundles_import(tmp_path, hardware, tp, has_skew):
    folder = data_folder() / "vllm_ground_truth/perf" / hardware / "meta-llama/Llama-3.1-8B/bf16"
    imported = import_bundle(folder, Options(tensor_parallel_size=tp))
    assert (imported.profile.skew is not None) == has_skew
    assert (imported.profile.all_reduce is not None) == (tp > 1)
    assert imported.meta["layers"]["layernorm"] == 64
    published = {("RTX4090", 1): "0.45 %", ("RTXPRO6000", 1): "2.1 %"}.get((hardware, tp))
    assert str(imported.meta.get("published_error")).startswith(str(published))
    imported.save(tmp_path)
    cost = load_profile(tmp_path, Deployment(model("llama-3.1-8b"), gpu(hardware), tp))
    shape = BatchShape(32, 32_000, 1000, rows_sampled=32, decode_context_min_tokens=1000)
    assert 8e6 < cost.step_ns(shape)[0] < 30e6
    assert not cost.outside(shape)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["dense.csv", "per_sequence.csv", "attention.csv", "layers"])
def test_published_error_is_only_of_the_tables_that_gave_it(tmp_path, file):
    root = data_folder() / "vllm_ground_truth"
    for folder in ("perf/RTX4090", "model_configs"):
        shutil.copytree(root / folder, tmp_path / folder)
    path = tmp_path / "perf/RTX4090/meta-llama/Llama-3.1-8B/bf16"
    for table in (path / "tp1").glob("*.csv"):  # as a checkout on Windows has them
        table.write_text("\n".join(table.read_text().splitlines()) + "\n", newline="\r\n")
    assert "published_error" in import_bundle(path, Options()).meta
    if file == "layers":
        changed = tmp_path / "model_configs/llama.architecture.yaml"
        changed.write_text(changed.read_text().replace("[o_proj, layernorm]", "[o_proj]"))
    else:
        lines = (path / "tp1" / file).read_text().splitlines()
        (path / "tp1" / file).write_text("\n".join(lines[:-1]) + "\n")
    assert "published_error" not in import_bundle(path, Options()).meta


def vidur_rows(tmp_path, of_two=1, **changes):
    ops = (
        "emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
        "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
    )  # fmt: skip
    header = [f"time_stats.{op}.median" for op in ops]
    shape = {
        "n_embd": 4096, "n_head": 32, "n_kv_head": 8, "n_expanded_embd": 14336,
        "vocab_size": 128256, "use_gated_mlp": True,
    } | changes  # fmt: skip
    header += ["num_tokens", "num_tensor_parallel_workers", *shape]
    # Every operator takes t microseconds for t tokens, or `of_two` as many on two devices, measured
    # twice.
    rows = [
        [t * (of_two if tp == 2 else 1) / 1000] * len(ops) + [t, tp, *shape.values()]
        for t in (1, 100)
        for tp in (1, 2)
        for _ in range(2)
    ]
    path = tmp_path / "Meta-Llama-3-8B" / "mlp.csv"
    write_csv(path, header, rows)
    return path


def test_vidur_operators_are_added_up_and_attention_is_a_roofline(tmp_path):
    imported = import_vidur(vidur_rows(tmp_path), "a100")
    imported.save(tmp_path / "out")
    cost = load_profile(
        tmp_path / "out", Deployment(model("llama-3-8b"), gpu("a100-80gb"), dtype="fp16")
    )
    ten, twenty = (
        cost.step_ns(BatchShape(0, 0, 0, ((t, 0),), padding_tokens=0, rows_sampled=1))[0] / 1000
        for t in (10, 20)
    )
    # 1 + 32 * 9 operators of a microsecond a token; attention of 20 new tokens is well below that.
    assert twenty - ten == pytest.approx((1 + 32 * 9) * 10, rel=0.01)
    assert any("attention follows a roofline" in line for line in imported.assumptions)
    assert cost.describe()["published_error"].startswith("none published of this profile")


def test_vidur_tensor_parallelism_takes_measured_all_reduces_inside_one_machine(tmp_path):
    path = vidur_rows(tmp_path, of_two=2)  # that nobody takes one for the other
    with pytest.raises(SpecError, match="--network"):
        import_vidur(path, "a100", tensor_parallel_size=2)
    network = tmp_path / "all_reduce.csv"
    header = ["num_workers", "size", "devices_per_node", "time_stats.all_reduce.median"]
    # 8192 bytes are one token of Llama-3-8B; the slow rows are between machines.
    write_csv(network, header, [(2, 8192, 2, 0.1), (2, 81920, 2, 0.2), (2, 8192, 1, 9)])
    two = import_vidur(path, "a100", tensor_parallel_size=2, network=network)
    reduce = two.profile.by_tokens[-1]
    assert (reduce.name, reduce.calls) == ("all_reduce", 64)
    assert [line for line in two.assumptions if "all-reduces" in line] == [
        "all-reduces as measured for 2 workers inside one machine"
    ]
    one = import_vidur(path, "a100")
    assert len(two.assumptions) == 1 + len(one.assumptions)
    pairs = list(zip(one.profile.by_tokens, two.profile.by_tokens[:-1], strict=True))
    assert len(pairs) > 5
    for alone, shared in pairs:
        assert shared.name == alone.name
        if alone.name in ("emb", "norm"):
            continue
        assert (shared.at, shared.us) == (alone.at, tuple(2 * us for us in alone.us)), alone.name
    with pytest.raises(SpecError, match="3 does not divide the 32 heads of llama-3-8b"):
        import_vidur(path, "a100", tensor_parallel_size=3, network=network)
    with pytest.raises(SpecError, match="no rows of tensor parallel size 4: 1, 2"):
        import_vidur(path, "a100", tensor_parallel_size=4, network=network)
    assert (reduce.at, reduce.us) == ((1.0, 10.0), (100.0, 200.0))


@pytest.mark.parametrize(
    ("column", "value", "own"),
    [
        ("n_embd", 5120, 4096),
        ("n_head", 40, 32),
        ("n_kv_head", 32, 8),
        ("n_expanded_embd", 11008, 14336),
        ("vocab_size", 32768, 128256),
        ("vocab_size", 128255, 128256),
        ("vocab_size", 129280, 128256),
        ("use_gated_mlp", False, True),
    ],
)
def test_vidur_profile_of_another_model_is_refused(tmp_path, column, value, own):
    path = vidur_rows(tmp_path, **{column: value})
    with pytest.raises(SpecError, match=f"{column} is {value}, but llama-3-8b has {own}"):
        import_vidur(path, "a100")


def test_vidur_profile_of_a_padded_vocabulary_is_of_the_model(tmp_path):
    shape = {"n_kv_head": 32, "n_expanded_embd": 11008, "vocab_size": 32768}
    path = vidur_rows(tmp_path, **shape)
    assert import_vidur(path, "a100", "llama-2-7b").meta["model"] == "llama-2-7b"
    with pytest.raises(SpecError, match="but llama-3-8b has 8"):
        import_vidur(path, "a100", "llama-3-8b")


def splitwise_rows(tmp_path):
    header = (
        "model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size",
        "prompt_time", "token_time",
    )  # fmt: skip
    own = ("llama2-70b", "a100-80gb", 8)
    rows = [
        (*own, 512, 1, 128, 90, 40), (*own, 512, 1, 128, 94, 44), (*own, 1024, 1, 128, 180, 43),
        (*own, 512, 8, 128, 700, 50), ("llama2-70b", "h100-80gb", 8, 512, 1, 128, 1, 1),
    ]  # fmt: skip
    write_csv(tmp_path / "perf_model.csv", header, rows)
    return tmp_path / "perf_model.csv"


def test_splitwise_steps_are_prompts_of_all_tokens_or_decodes_by_batch(tmp_path):
    path = splitwise_rows(tmp_path)
    import_splitwise(path, "llama2-70b", "a100-80gb").save(tmp_path / "out")
    cost = load_profile(
        tmp_path / "out",
        Deployment(model("llama-2-70b"), gpu("a100-80gb"), tensor_parallel_size=8, dtype="fp16"),
    )

    def ms(*shape, **more):
        return cost.step_ns(BatchShape(*shape, **more))[0] / 1e6

    assert ms(0, 0, 0, ((512, 0),)) == 92  # the median of two measurements
    assert ms(0, 0, 0, ((256, 0), (512, 0))) == pytest.approx((92 + 180) / 2)
    assert ms(8, 8 * 576, 576, decode_context_min_tokens=576) == 50
    assert ms(1, 576, 576, decode_context_min_tokens=576) == 42
    # With 8 decodes, a prompt of 512 costs what 520 tokens cost.
    assert ms(8, 800, 100, ((512, 0),)) == pytest.approx(92 + 8 / 512 * 88)


def test_splitwise_names_that_were_not_measured_are_refused(tmp_path):
    path = splitwise_rows(tmp_path)
    with pytest.raises(SpecError, match="hardware 'a100' was not measured"):
        import_splitwise(path, "llama2-70b", "a100")
    with pytest.raises(SpecError, match="has no tp 4"):
        import_splitwise(path, "llama2-70b", "a100-80gb", 4)


def write_cell(path, line, column, value):
    header, *rows = (text.split(",") for text in path.read_text().splitlines())
    rows[line - 2][header.index(column)] = str(value)
    write_csv(path, header, rows)


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("prompt_size", 0, "at least 1, got '0'"), ("batch_size", 0, "at least 1, got '0'"),
        ("batch_size", -4, "at least 1, got '-4'"), ("token_size", -100, "at least 1, got '-100'"),
        ("prompt_time", -100, "at least 0.001, got '-100'"), ("token_time", 0, "at least 0.001"),
    ],
)  # fmt: skip
def test_splitwise_row_that_no_engine_can_give_is_refused_with_file_and_line(
    tmp_path, column, value, told
):
    path = splitwise_rows(tmp_path)
    write_cell(path, 4, column, value)
    with pytest.raises(SpecError, match=rf"perf_model\.csv:4: {column} must be {told}"):
        import_splitwise(path, "llama2-70b", "a100-80gb")


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [("num_tokens", -5, "at least 1, got '-5'"), ("time_stats.emb.median", -3, "at least 0")],
)
def test_vidur_row_that_no_engine_can_give_is_refused_with_file_and_line(
    tmp_path, column, value, told
):
    path = vidur_rows(tmp_path)
    write_cell(path, 3, column, value)
    with pytest.raises(SpecError, match=rf"mlp\.csv:3: {column} must be {told}"):
        import_vidur(path, "a100")


def test_vidur_operator_that_takes_no_time_at_all_is_refused(tmp_path):
    path = vidur_rows(tmp_path)
    header, *rows = (line.split(",") for line in path.read_text().splitlines())
    for row in rows:
        row[header.index("time_stats.add.median")] = "0"
    write_csv(path, header, rows)
    with pytest.raises(SpecError, match="all times of add are 0"):
        import_vidur(path, "a100")


@pytest.mark.parametrize("us", [[-1.0, -1.0], [0.0, 0.0], [float("inf"), 1.0]])
def test_imported_profile_that_no_run_could_load_is_not_written(tmp_path, us):
    imported = import_splitwise(splitwise_rows(tmp_path), "llama2-70b", "a100-80gb")
    grid = {name: [0, 8] for name in ("prefill_chunk", "kv_prefill")}
    grid |= {name: [1, 0] for name in ("num_decodes", "kv_decode")} | {"us": us}
    broken = replace(imported, profile=replace(imported.profile, attention=grid))
    with pytest.raises(SpecError, match="attention"):
        broken.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_published_vidur_and_splitwise_files_import(tmp_path):
    root = data_folder() / "profiles"
    compute = root / "vidur/compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv"
    network = root / "vidur/network/a100_dgx/all_reduce.csv"
    import_vidur(compute, "a100", tensor_parallel_size=2, network=network).save(tmp_path / "vidur")
    path = root / "splitwise/perf_model.csv"
    import_splitwise(path, "llama2-70b", "h100-80gb", 4).save(tmp_path / "splitwise")
    shape = BatchShape(8, 8000, 1000, rows_sampled=8, decode_context_min_tokens=1000)
    for name, least, most in (("vidur", 6e6, 12e6), ("splitwise", 20e6, 60e6)):
        assert least < load_profile(tmp_path / name).step_ns(shape)[0] < most


class LinearSteps:
    """Prices of steps that are easy to add up, in milliseconds."""

    def predict_prefill_latency(self, bs, isl, prefix=0):
        return 10 + (isl - prefix) + prefix / 1000

    def predict_decode_latency(self, bs, isl, osl=2):
        return 5 + bs + bs * isl / 1000

    def mixed_step_breakdown(self, ctx_tokens, gen_tokens, isl, osl):
        shared, decode = 10 + ctx_tokens + gen_tokens, gen_tokens * isl / 1000
        return shared + decode, shared, 0.0, decode


def test_aiconfigurator_that_fails_says_why_in_one_line(monkeypatch, capsys):
    class EngineHandle:
        @staticmethod
        def compile(*_, **__):
            logging.getLogger("aiconfigurator_core.sdk").warning("Other tables are missing.")
            logging.getLogger("aiconfigurator_core.sdk").error("No database for %s", "l4")
            raise ValueError("backend_version is required")

    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    engine = types.ModuleType("aiconfigurator_core.sdk.engine")
    engine.EngineHandle = EngineHandle
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    with pytest.raises(
        SpecError, match=r"^aiconfigurator: No database for l4: ValueError: backend_version is requ"
    ):
        import_aiconfigurator("meta-llama/Meta-Llama-3.1-8B", "l4")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "tensor_parallel_size", "narrow_requests"),
    [
        ("llama-2-70b", 4, None),
        ("llama-2-7b", 2, 2),
        ("llama-2-13b", 1, 5),
        ("llama-2-13b", 2, None),
    ],
)
def test_aiconfigurator_is_asked_for_whole_steps_narrowed_attention_and_a_cold_cache(
    monkeypatch, name, tensor_parallel_size, narrow_requests
):
    shape, asked = model(name), []
    monkeypatch.setattr(aiconfigurator, "_known_shape", lambda name: shape)
    monkeypatch.setattr(aiconfigurator, "_open", lambda *given: asked.append(given) or "whole")
    monkeypatch.setattr(aiconfigurator, "_open_config", lambda *given: given)
    monkeypatch.setattr(aiconfigurator, "step_grid", lambda *given: given)
    monkeypatch.setattr(aiconfigurator.metadata, "version", lambda package: "9.8")
    found = import_aiconfigurator("theirs", "a100-80gb", tensor_parallel_size, "trtllm", "7")
    system = aiconfigurator.SYSTEMS["a100-80gb"]
    sizes = {"tp_size": tensor_parallel_size, "moe_tp_size": tensor_parallel_size, "moe_ep_size": 1}
    assert asked == [("theirs", system, "trtllm", "7", sizes)]
    whole, narrow, cold = found.profile
    assert whole == "whole"
    assert cold.bytes_per_token == (
        2 * shape.num_kv_heads // tensor_parallel_size * shape.head_dim * 2
    )
    assert (narrow is not None) == (narrow_requests is not None)
    assert any("which was not measured" in said for said in found.assumptions) == (
        narrow is not None
    )
    if narrow is not None:
        one = {"tp_size": 1, "moe_tp_size": 1, "moe_ep_size": 1}
        config = aiconfigurator._config(aiconfigurator._narrowed(shape))
        assert narrow.engine == (config, system, "trtllm", "7", one)
        assert narrow.requests == narrow_requests
    assert found.meta == {
        "model": name, "hardware": "a100-80gb", "dtype": "bf16",
        "tensor_parallel_size": tensor_parallel_size, "expert_parallel": False,
        "source": "aiconfigurator-core 9.8, trtllm 7",
    }  # fmt: skip


def test_aiconfigurator_grid_reproduces_the_steps_it_was_asked_for():
    cost = TableCostModel(step_grid(LinearSteps()), {})

    def ms(n, context, chunks=()):
        shape = BatchShape(n, n * context, context, chunks, decode_context_min_tokens=context)
        return cost.step_ns(shape)[0] / 1e6

    assert ms(5, 700) == pytest.approx(5 + 5 + 3.5)
    assert ms(0, 0, ((300, 2000),)) == pytest.approx(10 + 300 + 2)
    assert ms(5, 700, ((300, 2000),)) == pytest.approx(10 + 300 + 2 + 5 + 3.5)


class UnevenSteps:
    """Prices of steps in which every argument counts otherwise, in milliseconds."""

    def predict_prefill_latency(self, bs, isl, prefix=0):
        assert bs == 1
        return 7 + 3 * isl + prefix / 8

    def predict_decode_latency(self, bs, isl, osl=2):
        assert osl == 2
        return 1_000 + 5 * bs + isl / 4

    def mixed_step_breakdown(self, ctx_tokens, gen_tokens, isl, osl):
        assert osl == 2
        decode = 2 * gen_tokens + isl / 16
        return -1.0, 9 * ctx_tokens + 11 * gen_tokens + isl / 64, -2.0, decode


def alone(n, c):
    return 2 * n + c / 16


@pytest.mark.parametrize(
    ("narrow", "cold", "attention"),
    [
        (None, None, alone),
        (NarrowAttention(UnevenSteps(), 4), None, lambda n, c: alone(4 * n, c)),
        # In a cache of 1,000 contexts of one request: as if the time rose evenly up to 1,200.
        (None, ColdCache(10, 10_000), lambda n, c: alone(n, c)),
    ],
    ids=["as told", "narrow", "cold"],
)
def test_aiconfigurator_grid_has_each_step_of_each_kind_as_it_was_told(narrow, cold, attention):
    columns = step_grid(UnevenSteps(), narrow, cold).attention
    rows = zip(
        *(columns[key] for key in ("prefill_chunk", "kv_prefill", "num_decodes", "kv_decode")),
        columns["us"], strict=True,
    )  # fmt: skip
    found = {tuple(row[:4]): row[4] / 1e3 for row in rows}
    assert len(found) == 9 * 9 + 10 * 6 * (1 + 9 * 9)
    for n, c in ((1, 16), (4, 512), (256, 32768), (16, 2048)):
        decode = 1_000 + 5 * n + c / 4 - alone(n, c) + attention(n, c)
        assert found[0, 0, n, c] == pytest.approx(decode)
        for chunk, prefix in ((16, 0), (512, 64), (8192, 16384)):
            prefill = 7 + 3 * (chunk + prefix) + prefix / 8
            assert found[chunk, prefix, 0, 0] == pytest.approx(prefill)
            both = prefill + 11 * n + attention(n, c)
            assert found[chunk, prefix, n, c] == pytest.approx(both)


@pytest.mark.parametrize(
    ("num_requests", "context", "ms"),
    [
        # One request is out of the cache from 1,200 tokens on: 10 to 1,200 bytes beyond 16 tokens.
        (1, 16, 50.0),
        (1, 608, 50.0 + (3_000 - 50) * (608 - 16) / (1_200 - 16)),
        (1, 1_199, 50.0 + (3_000 - 50) * (1_199 - 16) / (1_200 - 16)),
        (1, 1_200, 3_000.0),
        (1, 5_000, 3_000.0),
        (5, 240, 3_000.0),  # five are from 240 on
        (5, 128, 50.0 + (3_000 - 50) * (128 - 16) / (240 - 16)),
        (7, 16, 50.0),
    ],
)
def test_aiconfigurator_attention_in_the_cache_takes_what_its_bytes_need(num_requests, context, ms):
    def timed(n, c):  # hardly longer with the context while it fits the cache
        return 3_000.0 if n * c >= 1_200 else 50.0

    cold = ColdCache(bytes_per_token=10, l2_bytes=10_000)
    assert cold.context(num_requests) == 1.2 * 10_000 / (10 * num_requests)
    assert aiconfigurator._cold_ms(timed, cold, num_requests, context) == pytest.approx(ms)
    slower = aiconfigurator._cold_ms(lambda n, c: 9_000.0 - c, cold, num_requests, context)
    assert slower >= 9_000.0 - context, "never less than what was timed"
    assert aiconfigurator._cold_ms(timed, None, num_requests, context) == timed(
        num_requests, context
    )


MIXTURE = model("mixtral-8x7b")


@pytest.mark.parametrize(
    ("shape", "is_plain"),
    [
        (model("llama-3-8b"), True),
        (MIXTURE, True),
        (replace(MIXTURE, num_dense_layers=1), False),  # not all of its layers have experts
        (replace(MIXTURE, shared_intermediate_size=64), False),
        (model("opt-13b"), False),
    ],
)
def test_aiconfigurator_is_told_of_models_that_a_configuration_can_say(shape, is_plain):
    assert aiconfigurator._is_plain(shape) == is_plain


@pytest.mark.parametrize(
    ("name", "kind", "architecture", "more"),
    [
        ("llama-3-8b", "llama", "LlamaForCausalLM", {"intermediate_size": 14336}),
        ("qwen3-8b", "qwen3", "Qwen3ForCausalLM", {"intermediate_size": 12288}),
        ("mixtral-8x7b", "mixtral", "MixtralForCausalLM",
         {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336}),
        ("qwen3-30b-a3b", "qwen3_moe", "Qwen3MoeForCausalLM",
         {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}),
    ],
)  # fmt: skip
def test_aiconfigurator_is_told_the_shape_of_a_model(name, kind, architecture, more, tmp_path):
    shape = model(name)
    config = aiconfigurator._config(shape)
    expected = {
        "model_type": kind, "architectures": [architecture], "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size, "max_position_embeddings": shape.max_model_len,
        "tie_word_embeddings": shape.tied_embeddings, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    # Read back it is the same model.
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = model(str(tmp_path / "config.json"))
    assert again.num_parameters == shape.num_parameters
    assert again.num_kv_heads == shape.num_kv_heads


def test_aiconfigurator_narrowed_model_has_as_many_query_heads_for_each_of_the_kv_heads():
    wide = replace(model("llama-2-7b"), num_heads=64, num_kv_heads=32, head_dim=100)
    narrow = aiconfigurator._narrowed(wide)
    assert (narrow.num_heads, narrow.num_kv_heads, narrow.head_dim) == (16, 8, 100)
    assert narrow.hidden_size == 16 * 100
    assert narrow.num_layers == wide.num_layers


def test_aiconfigurator_of_an_unknown_gpu_is_refused():
    with pytest.raises(SpecError, match="aiconfigurator has no 'h20'; did you mean h200"):
        import_aiconfigurator("meta-llama/Meta-Llama-3.1-8B", "h20")


def test_aiconfigurator_package_prices_a_known_model(tmp_path):
    pytest.importorskip("aiconfigurator_core", reason="optional package")
    imported = import_aiconfigurator("meta-llama/Meta-Llama-3.1-8B", "h100")
    imported.save(tmp_path)
    cost = load_profile(tmp_path, Deployment(model("llama-3.1-8b"), gpu("h100-80gb")))
    shape = BatchShape(8, 8000, 1000, rows_sampled=8, decode_context_min_tokens=1000)
    assert 5e6 < cost.step_ns(shape)[0] < 12e6


def test_aiconfigurator_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(SpecError, match=r"schedlab\[aiconfigurator\]"):
        import_aiconfigurator("meta-llama/Meta-Llama-3.1-8B", "h100")


@pytest.fixture
def compiled(monkeypatch):
    """Put a stand-in in place of the package, and return what it was asked to compile."""

    class Asked(list):
        unknown = ""
        fault = ValueError("no such model")

    asked = Asked()

    class Handle(LinearSteps):
        @classmethod
        def compile(cls, model_path, system, backend, **sizes):
            if model_path in ("nobody/nothing", asked.unknown):
                raise asked.fault
            config = Path(model_path) / "config.json"
            asked.append(
                (model_path, sizes, json.loads(config.read_text()) if config.is_file() else None)
            )
            return cls()

    engine = types.ModuleType("aiconfigurator_core.sdk.engine")
    engine.EngineHandle = Handle
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    monkeypatch.setattr(aiconfigurator.metadata, "version", lambda _: "0.12")
    return asked


@pytest.mark.parametrize(("spread", "widths"), [(False, (2, 1)), (True, (1, 2))])
def test_aiconfigurator_is_told_how_experts_are_split_over_devices(compiled, spread, widths):
    imported = import_aiconfigurator("Qwen/Qwen3-30B-A3B", "h100", 2, expert_parallel=spread)
    ((_, sizes, _),) = compiled
    assert (sizes["tp_size"], sizes["moe_tp_size"], sizes["moe_ep_size"]) == (2, *widths)
    assert imported.meta["expert_parallel"] is spread


def test_aiconfigurator_takes_a_folder_with_a_config_as_the_model(compiled, tmp_path):
    folder = tmp_path / "own-model"
    folder.mkdir()
    with pytest.raises(SpecError, match=r"own-model.config\.json: no such file"):
        import_aiconfigurator(str(folder), "h100")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"_name_or_path": "Qwen/tiny"}))
    imported = import_aiconfigurator(str(folder), "h100")
    assert compiled[0][0] == str(folder)
    assert imported.meta["model"] == model(str(folder)).name


def test_aiconfigurator_that_does_not_know_a_model_says_that_a_folder_will_do(compiled):
    # Whatever the package raises.
    for kind in (ValueError, KeyError, RuntimeError, OSError, AssertionError):
        compiled.fault = kind("no such model")
        told = rf"{kind.__name__}: .*no such model.*folder with its config\.json"
        with pytest.raises(SpecError, match=told):
            import_aiconfigurator("nobody/nothing", "h100")


def test_aiconfigurator_prices_many_kv_heads_as_more_requests_with_fewer():
    cost = TableCostModel(step_grid(LinearSteps(), NarrowAttention(LinearSteps(), 4)), {})

    def ms(n, context, chunks=()):
        shape = BatchShape(n, n * context, context, chunks, decode_context_min_tokens=context)
        return cost.step_ns(shape)[0] / 1e6

    assert ms(5, 700) == pytest.approx(5 + 5 + 4 * 3.5)
    assert ms(5, 700, ((300, 2000),)) == pytest.approx(10 + 300 + 2 + 5 + 4 * 3.5)


class CachedSteps(LinearSteps):
    """The same, but timed with a cache of 10,000 tokens, whose attention takes next to nothing."""

    def _saved(self, requests, context):
        return requests * context / 1000 if requests * context <= 10_000 else 0.0

    def predict_decode_latency(self, bs, isl, osl=2):
        return super().predict_decode_latency(bs, isl) - self._saved(bs, isl)

    def mixed_step_breakdown(self, ctx_tokens, gen_tokens, isl, osl):
        total, other, _, decode = super().mixed_step_breakdown(ctx_tokens, gen_tokens, isl, osl)
        saved = self._saved(gen_tokens, isl)
        return total - saved, other, 0.0, decode - saved


def test_aiconfigurator_prices_attention_that_was_timed_in_the_cache_as_outside_of_it():
    right = step_grid(LinearSteps()).attention
    warm = step_grid(CachedSteps()).attention["us"]
    cold = step_grid(CachedSteps(), cold=ColdCache(bytes_per_token=4, l2_bytes=40_000))
    found = cold.attention["us"]
    assert max(np.subtract(right["us"], warm)) == pytest.approx(8192)
    # The start-up, which is what the shortest contexts took, stays as it was timed.
    missing = np.multiply(right["num_decodes"], 16)
    assert (np.subtract(right["us"], found) <= missing + 1e-6).all()
    assert (np.subtract(found, right["us"]) <= 1e-6).all()


def test_aiconfigurator_asks_for_narrow_attention_only_beyond_the_measured_heads(compiled):
    import_aiconfigurator("meta-llama/Llama-3.1-8B", "h100")
    import_aiconfigurator("meta-llama/Llama-2-7b-hf", "h100", 4)
    assert len(compiled) == 2
    imported = import_aiconfigurator("meta-llama/Llama-2-7b-hf", "h100", 2)
    config = compiled[-1][2]
    assert len(compiled) == 4
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 8)
    assert (config["head_dim"], config["num_hidden_layers"]) == (128, 32)
    assert any("16 KV heads" in line and "2 times" in line for line in imported.assumptions)


def test_aiconfigurator_is_given_the_configuration_of_a_model_known_only_here(compiled):
    compiled.unknown = "meta-llama/Llama-3.1-8B"
    imported = import_aiconfigurator(compiled.unknown, "h100")
    assert imported.meta["model"] == "llama-3.1-8b"
    assert compiled[-1][2]["intermediate_size"] == 14336


@pytest.mark.parametrize(
    "name",
    ["llama-2-70b", "qwen3-14b", "qwen3-30b-a3b", "mixtral-8x7b", "llama-3.2-1b", "mistral-7b"],
)
def test_configuration_given_to_aiconfigurator_is_read_as_the_same_model(tmp_path, name):
    shape = model(name)
    (tmp_path / "config.json").write_text(json.dumps(aiconfigurator._config(shape)))
    read = read_config(tmp_path / "config.json")
    if shape.num_experts:  # no dense MLP, so its width means nothing
        read = replace(read, intermediate_size=shape.intermediate_size)
    assert replace(read, name=shape.name, source=shape.source) == shape


def test_aiconfigurator_of_a_dense_model_has_no_experts_to_spread(compiled):
    with pytest.raises(SpecError, match="llama-3-8b has no experts"):
        import_aiconfigurator("meta-llama/Meta-Llama-3-8B", "h100", 2, expert_parallel=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b", "needs a header and at least one row"),
        ("a,b\n1,2\n3\n4,5", r":3: 1 cells, the header has 2"),
        ("a,b\n1,2\n3,4\n5,6,7", r":4: 3 cells, the header has 2"),
        ("a,b\nx,2", r":2: a must be a number, got 'x'"),
        ("a,b\n1,2\n3,4\ninf,5", r":4: a must be a number, got 'inf'"),
        ("a,b\n1,2\nnan,5", r":3: a must be a number, got 'nan'"),
        ("a,b\n1,2\n3,4\n2.5,5", r":4: a must be whole, got 2.5"),
        ("a,b,a\n1,2,3", r":1: there are several columns 'a'"),
    ],
)
def test_csv_names_the_line_that_is_wrong(tmp_path, text, message):
    (path := tmp_path / "t.csv").write_text(text + "\n")
    with pytest.raises(SpecError, match=f"t.csv{message}" if message[0] == ":" else message):
        read_csv(path, ("a", "b")).whole("a")


def test_csv_with_a_cell_beyond_measure_is_refused_with_its_line(tmp_path):
    (path := tmp_path / "t.csv").write_text("a,b\n1,2\n3," + "x" * 1001)
    before = csv.field_size_limit(1000)  # traces raise the limit of the whole process
    try:
        with pytest.raises(SpecError, match=r"t\.csv:3: no CSV: field larger than field limit"):
            read_csv(path)
    finally:
        csv.field_size_limit(before)


def test_csv_with_a_byte_order_mark_or_unnamed_columns_is_read(tmp_path):
    (path := tmp_path / "t.csv").write_text("\ufeffa,b,,\n1,2,3,4\n", encoding="utf-8")
    assert read_csv(path, ("a", "b")).whole("a") == [1]


@pytest.mark.parametrize(("tp", "bytes_per_token"), [(1, 4096), (4, 1024), (16, 512)])
def test_aiconfigurator_counts_keys_and_values_of_a_gpu_in_its_cache(
    compiled, monkeypatch, tp, bytes_per_token
):
    # 8 heads of 128 numbers in 2 bytes each, twice; a GPU has one head at the least.
    caches = []
    monkeypatch.setattr(
        aiconfigurator, "step_grid", lambda engine, narrow, cold: caches.append(cold)
    )
    import_aiconfigurator("meta-llama/Llama-3.1-8B", "h100", tp)
    assert caches == [ColdCache(bytes_per_token, aiconfigurator.L2_BYTES["h100-80gb"])]
