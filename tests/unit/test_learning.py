"""Kernels learnt from tables: the numbers come back, files are read, faults are named."""

import json
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.sim.cost.efficiency import (
    SHIPPED,
    AllReduce,
    Attention,
    Elementwise,
    Experts,
    Gemm,
    Host,
    Sampler,
    composed,
    efficiency_of,
    gemm_format,
    read_learnt,
)
from schedlab.sim.cost.learning import errors
from schedlab.sim.cost.learning.errors import TableError, layer_errors, table_errors
from schedlab.sim.cost.learning.fit import fit_attention, fit_gemm, learn
from schedlab.sim.cost.learning.kernels_file import write_kernels
from schedlab.sim.cost.learning.predict import PREDICT, gemm_us
from schedlab.sim.cost.learning.tables import (
    Table,
    aiconfigurator_tables,
    llmservingsim_tables,
    vidur_tables,
)
from schedlab.sim.cost.product import Product
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model
from tests.data_folder import data_folder

H100 = gpu("h100-80gb")
GEMM = Gemm(4e-6, 0.85, 0.7, 0.4, 0.1)
ATTENTION = Attention(
    latency_s=9e-6, row_s=3e-6, row_share=0.4, bandwidth_share=0.9, ramp_s=7e-6,
    query_block=64, block_s=8e-6, flops_share=0.6, key_s=2e-8, mixed_rows=60.0,
)  # fmt: skip


def grid(**axes):
    """Return columns of all combinations."""
    arrays = np.meshgrid(*(np.array(values, dtype=float) for values in axes.values()))
    return {name: array.ravel() for name, array in zip(axes, arrays, strict=True)}


def products():
    columns = grid(m=[1, 16, 64, 100, 256, 300, 1024, 4096], n=[4096, 8192, 28672], k=[4096, 8192])
    return columns | {"us": gemm_us(GEMM, columns, H100, "bf16")}


def calls(kind):
    heads = {"heads": [32], "kv_heads": [4, 8]}
    columns = {
        "decode": grid(rows=[1, 8, 64, 512], context=[1, 4000, 16000, 60000], **heads),
        "prefill": grid(rows=[1, 4], new=[16, 100, 512, 4096], cached=[0, 1000, 8000], **heads),
        "mixed": grid(rows=[4, 32, 64], context=[500, 2000], new=[64, 512], cached=[0], **heads),
    }[kind]
    return columns | {"us": PREDICT[kind](ATTENTION, columns, H100)}


def tables(device="h100-80gb"):
    kinds = {"gemm bf16": products(), **{k: calls(k) for k in ("decode", "prefill", "mixed")}}
    kinds["launch"] = {"us": np.array([15.0, 16.0, 90.0])}
    return [Table(device, kind, "made", columns) for kind, columns in kinds.items()]


def test_learn_finds_the_numbers_that_made_the_tables():
    learnt = learn(tables())["h100-80gb"]
    assert asdict(learnt["gemm"]["bf16"]) == pytest.approx(asdict(GEMM), rel=0.02)
    assert asdict(learnt["attention"]) == pytest.approx(asdict(ATTENTION), rel=0.02)
    assert learnt["host"] == Host(16e-6)


def test_learn_without_decodes_beside_prompts_is_refused():
    with pytest.raises(SpecError, match=r"no table of decodes beside prompts: LLMServingSim's"):
        learn([t for t in tables() if t.kind != "mixed"])


@pytest.mark.slow
def test_learn_gives_kernels_that_pack_groups_no_rows_beside_prompts():
    packed = calls("decode")
    other = [Table("h200", t.kind, "made", t.columns) for t in tables() if t.kind == "prefill"]
    other.append(Table("h200", "decode", "made", packed | {"packs": np.ones(len(packed["us"]))}))
    unpacked = [Table("b200", t.kind, t.source, t.columns) for t in other[:1]]
    unpacked.append(Table("b200", "decode", "made", packed))
    learnt = learn([*tables(), *other, *unpacked])
    rows = {name: kernels["attention"].mixed_rows for name, kernels in learnt.items()}
    assert rows["h200"] == 0
    assert rows["b200"] == rows["h100-80gb"] == pytest.approx(60, rel=0.02)


def test_fit_never_takes_a_share_beyond_the_device():
    too_fast = products()
    too_fast["us"] = too_fast["us"] / 3
    kernel = fit_gemm([Table("h100-80gb", "gemm bf16", "made", too_fast)], H100, "bf16")
    assert kernel.flops_share <= 1
    assert kernel.bandwidth_share <= 1
    half = [Table("h100-80gb", t.kind, t.source, t.columns | {"us": t.columns["us"] / 3})
            for t in tables()]  # fmt: skip
    attention = fit_attention(half, H100)
    assert max(attention.flops_share, attention.bandwidth_share) <= 1


def test_predictions_of_tables_are_the_prices_of_steps():
    # One layer's numbers by hand from the vectors, against the model that prices steps.
    shape = replace(model("llama-3-8b"), num_layers=1)
    kernels = replace(efficiency_of(H100), attention=ATTENTION, gemm={"bf16": GEMM}, host=Host(0.0))
    cost = RooflineCostModel(Deployment(shape, H100), kernels)

    def attention_us(step, tokens):
        with_it = cost.step_ns(step)[0]
        return (with_it - cost.step_ns(BatchShape(0, 0, 0, padding_tokens=tokens))[0]) / 1e3

    heads = {"heads": 32.0, "kv_heads": 8.0}
    row = {"rows": 48.0, "context": 700.0, "new": 300.0, "cached": 900.0, **heads}
    columns = {key: np.array([value]) for key, value in row.items()}
    decodes = BatchShape(48, 48 * 700, 700)
    assert attention_us(decodes, 48) == pytest.approx(
        PREDICT["decode"](ATTENTION, columns, H100)[0], abs=0.01
    )
    chunk = BatchShape(0, 0, 0, chunks=((300, 900),))
    alone = PREDICT["prefill"](ATTENTION, columns | {"rows": np.ones(1)}, H100)[0]
    assert attention_us(chunk, 300) == pytest.approx(alone, abs=0.01)
    both = replace(decodes, chunks=((300, 900),))
    mixed = PREDICT["mixed"](ATTENTION, columns, H100)[0]
    assert attention_us(both, 348) == pytest.approx(mixed, abs=0.01)


def test_scalar_and_vector_formulas_of_products_agree():
    columns = products()
    for i in range(len(columns["us"])):
        m, n, k = (float(columns[key][i]) for key in "mnk")
        product = Product(GEMM, k, n, 2 * n * k, 2 * (n + k), H100.peak_flops_per_s("bf16"), H100)
        assert 1e6 * product.seconds(m) == pytest.approx(columns["us"][i])


def test_composed_takes_kin_first_then_all():
    flops = {"h100-80gb": 0.8, "h200": 0.6, "l40s": 0.1}
    learnt = {name: {"gemm": {"bf16": Gemm(0, 1, share)}} for name, share in flops.items()}
    rest = {
        "attention": ATTENTION, "elementwise": Elementwise(0, 1), "sampler": Sampler(0, 1),
        "experts": Experts(0, 1, 1), "all_reduce": AllReduce(0, 0, 1, 0), "host": Host(0),
    }  # fmt: skip
    learnt["l40s"] |= rest
    own, kin, stranger = (
        composed(gpu(name), learnt) for name in ("h100", "h100-80gb-pcie", "a100")
    )
    assert own.gemm["bf16"].flops_share == 0.8
    assert kin.gemm["bf16"].flops_share == pytest.approx(0.7)
    assert stranger.gemm["bf16"].flops_share == pytest.approx(0.5)
    assert own.attention == ATTENTION
    assert kin.origin["gemm bf16"] == "h100-80gb, h200"


def kernels(step, query_block=64):
    """Return every kernel, each number another, and all of them by a step larger."""

    def up(*values):
        return [value + step * value for value in values]

    return {
        "attention": Attention(*up(1e-6, 2e-6, 0.1, 0.2, 3e-6), query_block,
                               *up(4e-6, 0.3, 5e-6, 8.0)),
        "elementwise": Elementwise(*up(6e-6, 0.15)), "sampler": Sampler(*up(7e-6, 0.25)),
        "experts": Experts(*up(8e-6, 0.35, 0.4)),
        "all_reduce": AllReduce(*up(9e-6, 10e-6, 0.45, 0.05)), "host": Host(*up(11e-6)),
    }  # fmt: skip


def test_composed_says_of_each_kernel_whose_it_is_and_means_every_number_of_them():
    # Of the H200's kin two have attention, one has experts; the others are of all there are.
    learnt = {
        "l40s": {"gemm": {"bf16": Gemm(1, 0.1, 0.2)}, **kernels(0.0)},
        "h100-80gb": {"attention": kernels(0.2, 128)["attention"], "gemm": {"fp8": Gemm(2, 1, 1)}},
        "a100-80gb": kernels(0.4),
        "h100-80gb-pcie": {key: kernels(0.6, 128)[key] for key in ("attention", "experts")},
        "h200": {"host": Host(5.0)},
    }
    found = composed(gpu("h200"), learnt)
    assert found.origin == {
        "gemm bf16": "l40s", "gemm fp8": "h100-80gb",
        "attention": "h100-80gb, h100-80gb-pcie", "experts": "h100-80gb-pcie",
        "elementwise": "l40s, a100-80gb", "sampler": "l40s, a100-80gb",
        "all_reduce": "l40s, a100-80gb", "host": "h200",
    }  # fmt: skip
    assert found.gemm == {"bf16": Gemm(1, 0.1, 0.2), "fp8": Gemm(2, 1, 1)}
    assert found.host == Host(5.0)
    assert found.experts == kernels(0.6)["experts"]
    for kind, step in (("attention", 0.4), ("elementwise", 0.2), ("sampler", 0.2),
                       ("all_reduce", 0.2)):  # fmt: skip
        wanted = asdict(kernels(step, 128)[kind])
        assert asdict(getattr(found, kind)) == pytest.approx(wanted, rel=1e-12), kind
    most = {name: kernels(0, size) for name, size in (("l40s", 96), ("l4", 32), ("b200", 32))}
    most["l40s"]["gemm"] = {"bf16": GEMM}
    assert composed(gpu("a100"), most).attention.query_block == 32
    with pytest.raises(SpecError, match="no GPU has kernels of kind attention"):
        composed(gpu("h200"), {"l40s": {"gemm": {"bf16": GEMM}}})


@pytest.mark.parametrize(("flops", "bandwidth"), [(0.9, None), (None, 0.8), (0.9, 0.8), (1, 1)])
def test_shares_that_are_given_replace_those_of_every_kernel_and_nothing_else(flops, bandwidth):
    gemm = {"bf16": Gemm(1, 0.1, 0.2, 0.3, 0.4), "fp8": Gemm(2, 0.5, 0.6)}
    whole = composed(gpu("h200"), {"h200": {"gemm": gemm, **kernels(0.0)}})
    found = whole.with_shares(flops, bandwidth)
    pairs = [(whole.gemm[key], found.gemm[key]) for key in gemm]
    kinds = ("attention", "elementwise", "sampler", "experts", "all_reduce", "host")
    pairs += [(getattr(whole, kind), getattr(found, kind)) for kind in kinds]
    for one, other in pairs:
        wanted = asdict(one)
        if flops is not None and "flops_share" in wanted:
            wanted["flops_share"] = flops
        if bandwidth is not None and "bandwidth_share" in wanted:
            wanted["bandwidth_share"] = bandwidth
        assert asdict(other) == wanted
    assert found.origin == whole.origin


@pytest.mark.parametrize("share", [0.0, -0.1, 1.001, float("nan")])
@pytest.mark.parametrize("key", ["compute_efficiency", "memory_efficiency"])
def test_share_that_cannot_be_reached_is_refused_by_its_key(key, share):
    whole = composed(gpu("h200"), {"h200": {"gemm": {"bf16": GEMM}, **kernels(0.0)}})
    given = (share, 0.5) if key == "compute_efficiency" else (0.5, share)
    with pytest.raises(SpecError, match=rf"{key} must be in \(0, 1\]"):
        whole.with_shares(*given)


def test_sum_over_devices_takes_a_start_a_hop_each_and_longer_the_more_there_are():
    ring = AllReduce(latency_s=1.0, hop_s=0.1, link_share=0.5, crowding=0.25)
    assert ring.seconds(2, 800, 400) == pytest.approx(1.0 + 0.1 + 800 / 200)
    assert ring.seconds(4, 800, 400) == pytest.approx(1.0 + 0.3 + 1.5 * 800 / 200)


def test_errors_of_a_table_are_those_of_its_kernels_and_of_kernels_of_other_gpus():
    launch = {"us": np.array([5.0, 10.0, 40.0])}
    logits = {"logits": np.array([3350.0, 6700.0]), "us": np.array([2.0, 2.0])}
    layers = {"m": np.array([2.0, 64.0]), "n": np.full(2, 8192.0), "k": np.full(2, 8192.0)}
    slow, fast = Gemm(9e-6, 0.5, 0.5), Gemm(1e-6, 1.0, 1.0)
    layers["us"] = 2 * gemm_us(fast, layers, H100, "bf16")
    learnt = {
        "h100-80gb": {"gemm": {"bf16": fast}, "host": Host(10e-6), "sampler": Sampler(1e-6, 1e3)},
        "l40s": {**kernels(0.0), "gemm": {"bf16": slow}, "host": Host(20e-6)},
    }
    del learnt["l40s"]["sampler"]
    tables = [
        Table("h100-80gb", "launch", "a", launch), Table("h100-80gb", "sampler", "b", logits),
        Table("h100-80gb", "gemm bf16", "c", layers),
    ]  # fmt: skip
    found = table_errors(tables, learnt)
    facts = [("launch", "a", 3), ("sampler", "b", 2), ("gemm bf16", "c", 2)]
    assert [(e.gpu, e.kind, e.source, e.num_rows) for e in found] == [
        ("h100-80gb", *fact) for fact in facts
    ]
    # 10 us instead of 5, 10 and 40; 20 us by the other GPU.
    assert found[0].error == pytest.approx((1 + 0 + 0.75) / 3)
    assert found[0].without_gpu == pytest.approx((3 + 1 + 0.5) / 3)
    # 1 us and a kilobyte a logit, at 3.35 TB/s: 2 and 3 us. Nobody else has it.
    assert found[1].error == pytest.approx((0 + 0.5) / 2)
    assert found[1].without_gpu is None
    assert found[2].error == pytest.approx(0.5)
    other = gemm_us(slow, layers, H100, "bf16") / layers["us"] - 1
    assert found[2].without_gpu == pytest.approx(np.abs(other).mean())


def test_errors_of_layers_add_up_products_and_learn_from_other_models_of_the_gpu(monkeypatch):
    fast, kin = Gemm(1e-6, 1.0, 1.0), Gemm(9e-6, 0.5, 0.5)
    learnt = {"h100-80gb": {**kernels(0.0), "gemm": {"bf16": fast}}}

    def layer(gpu_name, factors):
        # Two products of 16 rows on one device, two on two, and one of 32 rows.
        columns = {
            "m": np.array([16.0, 16, 32, 16, 16]), "n": np.array([1024.0, 2048, 4096, 512, 1024]),
            "k": np.full(5, 4096.0), "workers": np.array([1, 1, 1, 2, 2]),
        }  # fmt: skip
        exact = gemm_us(fast, columns, gpu(gpu_name), "bf16")
        return Table(gpu_name, "gemm bf16", "made", columns | {"us": exact * factors}), exact

    factors = np.array([2.0, 1.0, 4.0, 1.0, 1.0])
    one, us = layer("h100-80gb", factors)
    other, _ = layer("h100-80gb", np.ones(5))
    far, _ = layer("h200", np.full(5, 1.25))
    asked = []
    monkeypatch.setattr(errors, "fit_gemm", lambda *given: asked.append(given) or kin)
    found = layer_errors([("one", one), ("other", other), ("one", far)], learnt)
    assert list(found) == ["h100-80gb", "h200"]
    both = 1 - (us[0] + us[1]) / (2 * us[0] + us[1])
    assert found["h100-80gb"]["one"]["learnt"] == pytest.approx((both + 0.75 + 0) / 3)
    assert found["h100-80gb"]["other"]["learnt"] == pytest.approx(0)
    assert found["h200"] == {"one": {"learnt": pytest.approx(0.2)}}
    by_kin = gemm_us(kin, other.columns, H100, "bf16")
    sums = [(by_kin[:2].sum(), us[:2].sum()), (by_kin[2], us[2]), (by_kin[3:].sum(), us[3:].sum())]
    wanted = np.mean([abs(a / b - 1) for a, b in sums])
    assert found["h100-80gb"]["other"]["other_models"] == pytest.approx(wanted)
    assert asked == [([other], H100, "bf16"), ([one], H100, "bf16")]


def test_gemm_formats_of_wide_numbers_are_one():
    assert gemm_format("fp32", "bf16") == "bf16"
    assert gemm_format("fp8", "fp8") == "fp8"
    assert gemm_format("fp16", "int4") == "bf16/int4"


@pytest.mark.slow
def test_errors_are_those_with_and_without_the_gpu():
    made = tables()
    slower = [
        Table("h200", t.kind, t.source, t.columns | {"us": 1.5 * t.columns["us"]}) for t in made
    ]
    learnt = learn([*made, *slower])
    for kernels in learnt.values():  # what these tables do not have
        kernels |= {"elementwise": Elementwise(0, 1), "sampler": Sampler(0, 1),
                    "experts": Experts(0, 1, 1), "all_reduce": AllReduce(0, 0, 1, 0)}  # fmt: skip
    errors = {(e.gpu, e.kind): e for e in table_errors([*made, *slower], learnt)}
    assert errors["h100-80gb", "gemm bf16"].error < 0.01
    assert errors["h100-80gb", "launch"].without_gpu == pytest.approx(0.611, abs=0.01)
    assert errors["h100-80gb", "gemm bf16"].without_gpu > 0.1
    layer = Table("h100-80gb", "gemm bf16", "made", products() | {"workers": np.ones(48)})
    models = [("one", layer), ("two", layer)]
    found = layer_errors(models, learnt)["h100-80gb"]["one"]
    assert found["learnt"] < 0.01
    assert found["other_models"] < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "schedlab-kernels-0"}, "schema 'schedlab-kernels-0'"),
        ({"gpus": {"x": {"gem": {}}}}, r"x\.gem: unknown kernel; did you mean gemm\?"),
        ({"gpus": {"x": {"host": {}}}}, r"x\.host: key 'call_s' is missing"),
        ({"gpus": {"x": {"host": {"call_s": -1}}}}, r"x\.host\.call_s must be >= 0"),
        ({"gpus": {"x": {"host": {"cal_s": 1}}}}, r"x\.host: unknown key 'cal_s'; did you mean"),
        ({"gpus": {"x": {"host": 3}}}, r"x\.host: must map call_s to numbers"),
        (
            {"gpus": {"x": {"elementwise": {"latency_s": 0, "bandwidth_share": 1.1}}}},
            r"bandwidth_share must be in \(0, 1\], got 1.1",
        ),
        (
            {"gpus": {"x": {"all_reduce": {**asdict(AllReduce(1, 0, 1, 0)), "link_share": 1.1}}}},
            r"all_reduce\.link_share must be in \(0, 1\], got 1\.1",
        ),
        (
            {"gpus": {"x": {"experts": {**asdict(Experts(0, 1, 1)), "flops_share": 0}}}},
            r"experts\.flops_share must be in \(0, 1\], got 0",
        ),
        (
            {"gpus": {"x": {"attention": {**asdict(ATTENTION), "row_share": 1.01}}}},
            r"attention\.row_share must be at most 1, got 1\.01",
        ),
        (
            {
                "gpus": {
                    "x": {"gemm": {"bf16": {**asdict(GEMM), "tile_share": 0.5, "wave_share": 0.51}}}
                }
            },
            r"bf16: tile_share and wave_share must be at most 1 together",
        ),
    ],
)
def test_kernels_file_with_a_fault_names_file_and_key(tmp_path, change, message):
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"schema": "schedlab-kernels-1", "gpus": {}} | change))
    with pytest.raises(SpecError, match=f"kernels.json: .*{message}"):
        read_learnt(path)


def test_learnt_numbers_are_written_with_four_digits_however_small_they_are(tmp_path):
    path = tmp_path / "kernels.json"
    gemm = Gemm(1.23456e-6, 0.81239, 0.5, 0.0, 0.0)
    write_kernels(path, {"x": {"gemm": {"bf16": gemm}, "host": Host(2.34567e-5)}}, [], {})
    found = json.loads(path.read_text())["gpus"]["x"]
    assert found["gemm"]["bf16"]["latency_s"] == 1.235e-6
    assert found["gemm"]["bf16"]["bandwidth_share"] == 0.8124
    assert found["host"] == {"call_s": 2.346e-5}


def test_kernels_file_tells_errors_of_tables_and_layers_by_name_and_leaves_out_unknown_ones(
    tmp_path,
):
    path = tmp_path / "kernels.json"
    errors = [
        TableError("h200", "decode", "a", 7, 0.012345, None),
        TableError("b200", "gemm bf16", "b", 9, 0.25, 0.98765),
    ]
    layers = {"h200": {"one": {"learnt": 0.0123456, "other_models": 0.5}, "two": {"learnt": 1.0}}}
    write_kernels(path, {"h200": {"experts": Experts(1.23456e-6, 0.5, 0.25)}}, errors, layers)
    assert json.loads(path.read_text()) == {
        "schema": "schedlab-kernels-1",
        "learnt_by": "schedlab profile learn",
        "gpus": {"h200": {"experts": {
            "latency_s": 1.235e-6, "bandwidth_share": 0.5, "flops_share": 0.25,
        }}},
        "tables": [
            {"gpu": "h200", "kind": "decode", "source": "a", "num_rows": 7, "error": 0.0123},
            {"gpu": "b200", "kind": "gemm bf16", "source": "b", "num_rows": 9, "error": 0.25,
             "without_gpu": 0.988},
        ],
        "layers_that_did_not_teach": {
            "h200": {"one": {"learnt": 0.0123, "other_models": 0.5}, "two": {"learnt": 1.0}},
        },
    }  # fmt: skip


def test_shipped_kernels_say_which_tables_taught_them_and_how_near_they_come():
    data = json.loads(SHIPPED.read_text())
    assert {row["gpu"] for row in data["tables"]} == set(data["gpus"])
    assert all(0 < row["error"] < 0.3 for row in data["tables"])
    assert not any("Vidur" in row["source"] for row in data["tables"])
    own = [row["error"] for row in data["tables"] if row["kind"] == "gemm bf16"]
    assert np.mean(own) < 0.08
    for models in data["layers_that_did_not_teach"].values():
        assert all(errors["other_models"] < 0.08 for errors in models.values())


def write_systems(folder, **changes):
    """Write AIConfigurator's products of one GPU."""
    rows = {
        "gemm_dtype": ["bfloat16", "fp8", "bfloat16"], "m": [1, 1, 64], "n": [4096] * 3,
        "k": [4096] * 3, "latency": [0.01, 0.008, 0.02], "kernel_source": ["x"] * 3,
    } | changes  # fmt: skip
    path = folder / "data/h100_sxm/gemm/vllm/0.9.0"
    path.mkdir(parents=True)
    pq.write_table(pa.table(rows), path / "gemm_perf.parquet")
    newer = folder / "data/h100_sxm/gemm/vllm/0.24.0"
    newer.mkdir(parents=True)
    pq.write_table(pa.table(rows | {"latency": [0.02, 0.01, 0.04]}), newer / "gemm_perf.parquet")


def test_aiconfigurator_tables_are_those_of_the_newest_version_by_format(tmp_path):
    write_systems(tmp_path)
    found = {table.kind: table for table in aiconfigurator_tables(tmp_path)}
    assert set(found) == {"gemm bf16", "gemm fp8"}
    assert found["gemm bf16"].columns["us"].tolist() == [20.0, 40.0]
    assert found["gemm bf16"].columns["m"].tolist() == [1.0, 64.0]
    assert "vllm/0.24.0" in found["gemm fp8"].source


def test_aiconfigurator_pointer_instead_of_a_table_is_named(tmp_path):
    write_systems(tmp_path)
    path = tmp_path / "data/h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SpecError, match=r"gemm_perf\.parquet: no parquet file \(a pointer"):
        list(aiconfigurator_tables(tmp_path))


@pytest.mark.parametrize("reader", [aiconfigurator_tables, llmservingsim_tables, vidur_tables])
def test_folder_without_tables_is_refused(tmp_path, reader):
    with pytest.raises(SpecError, match="known GPU"):
        list(reader(tmp_path))


def test_llmservingsim_tables_teach_the_form_of_every_kernel_it_times(tmp_path):
    folder = data_folder() / "vllm_ground_truth" / "perf"
    found = list(llmservingsim_tables(folder))
    assert {t.gpu for t in found} == {"rtx-4090", "rtx-pro-6000"}
    kinds = {"gemm bf16", "elementwise", "sampler", "decode", "prefill", "mixed"}
    assert {t.kind for t in found} == kinds
    output = tmp_path / "kernels.json"
    with pytest.raises(SpecError, match="no GPU has kernels of kind"):  # it times no experts
        composed(gpu("rtx-4090"), learn(found))
    assert not output.exists()


@pytest.mark.slow
def test_vidur_tables_hold_a_layer_of_each_model():
    found = list(vidur_tables(data_folder() / "profiles" / "vidur"))
    assert {(name, t.gpu) for name, t in found} == {
        ("Llama-2-7b-hf", "a100-80gb"), ("Llama-2-7b-hf", "h100-80gb"),
        ("Meta-Llama-3-8B", "a100-80gb"),
    }  # fmt: skip
    columns = dict(found)["Meta-Llama-3-8B"].columns
    whole = columns["workers"] == 1
    assert set(columns["n"][whole]) == {6144, 4096, 28672}
    assert set(columns["k"][whole]) == {4096, 14336}


def rows_of(table, *names):
    columns = (table.columns[name].tolist() for name in names)
    return list(zip(*columns, strict=True))


def test_tables_of_a_bundle_have_the_shapes_of_its_model(tmp_path):
    folder = tmp_path / "rtx-4090" / "meta" / "llama-3-8b" / "bf16" / "tp1"
    folder.mkdir(parents=True)
    (folder / "dense.csv").write_text(
        "layer,tokens,time_us\nqkv_proj,3,10\no_proj,3,11\ngate_up_proj,3,12\ndown_proj,3,13\n"
        "layernorm,5,14\nrotary_emb,5,15\nact_fn,5,16\nembedding,5,17\n"
    )
    (folder / "per_sequence.csv").write_text(
        "layer,sequences,time_us\nlm_head,2,18\nsampler,2,19\n"
    )
    (folder / "attention.csv").write_text(
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"
        "0,0,4,100,20\n64,32,0,0,21\n65,33,5,101,22\n"
    )
    (tmp_path / "unknown" / "meta" / "llama-3-8b" / "bf16" / "tp1").mkdir(parents=True)
    found = {table.kind: table for table in llmservingsim_tables(tmp_path)}
    assert {(table.gpu, table.source) for table in found.values()} == {
        ("rtx-4090", "LLMServingSim rtx-4090/meta/llama-3-8b/bf16/tp1")
    }
    # 32 heads of 128 and 8 of KV, 4,096 wide, 14,336 inside, 128,256 words.
    assert rows_of(found["gemm bf16"], "m", "n", "k", "us") == [
        (3, 6144, 4096, 10), (3, 4096, 4096, 11), (3, 28672, 4096, 12), (3, 4096, 14336, 13),
        (2, 128256, 4096, 18),
    ]  # fmt: skip
    assert rows_of(found["elementwise"], "bytes", "us") == [
        (163_840, 14), (102_400, 15), (430_080, 16),
    ]  # fmt: skip
    assert rows_of(found["sampler"], "logits", "us") == [(256_512, 19)]
    names = "new", "cached", "rows", "context", "heads", "kv_heads", "us"
    assert rows_of(found["decode"], *names) == [(0, 0, 4, 100, 32, 8, 20)]
    assert rows_of(found["prefill"], *names) == [(64, 32, 1, 0, 32, 8, 21)]
    assert rows_of(found["mixed"], *names) == [(65, 33, 5, 101, 32, 8, 22)]


def test_bundle_by_keys_has_no_attention_and_one_with_experts_no_products(tmp_path):
    folder = tmp_path / "rtx-4090" / "mistralai" / "mixtral-8x7b" / "bf16" / "tp1"
    folder.mkdir(parents=True)
    (folder / "dense.csv").write_text("layer,tokens,time_us\no_proj,3,11\nlayernorm,5,14\n")
    (folder / "per_sequence.csv").write_text(
        "layer,sequences,time_us\nlm_head,2,18\nsampler,2,19\n"
    )
    (folder / "attention.csv").write_text("prefill_chunk,n_decode,kv_decode,time_us\n0,1,2,3\n")
    found = {table.kind: table for table in llmservingsim_tables(tmp_path)}
    assert set(found) == {"gemm bf16", "elementwise", "sampler"}
    assert found["gemm bf16"].columns["us"].tolist() == [18]


def test_vidur_products_are_those_of_one_of_its_workers(tmp_path):
    path = tmp_path / "compute" / "a100-80gb" / "meta" / "One-8B" / "mlp.csv"
    path.parent.mkdir(parents=True)
    parts = "attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"
    path.write_text(
        "num_tokens,num_tensor_parallel_workers,n_head,n_kv_head,n_embd,n_expanded_embd,"
        "use_gated_mlp," + ",".join(f"time_stats.{part}.median" for part in parts) + "\n"
        "7,4,32,2,4096,14336,True,0.5,0.25,0.125,1\n9,1,32,8,4096,14336,False,1,2,3,4\n"
    )
    ((name, table),) = vidur_tables(tmp_path)
    assert (name, table.gpu, table.kind) == ("One-8B", "a100-80gb", "gemm bf16")
    assert table.source == "Vidur a100-80gb/meta/One-8B/mlp.csv"
    # Of 2 heads of KV each of four workers has one; milliseconds in the file.
    assert rows_of(table, "m", "n", "k", "workers", "us") == [
        (7, 1280, 4096, 4, 500), (9, 6144, 4096, 1, 1000),
        (7, 4096, 1024, 4, 250), (9, 4096, 4096, 1, 2000),
        (7, 7168, 4096, 4, 125), (9, 14336, 4096, 1, 3000),
        (7, 4096, 3584, 4, 1000), (9, 4096, 14336, 1, 4000),
    ]  # fmt: skip


def test_aiconfigurator_attention_experts_and_all_reduces_are_read_in_our_units(tmp_path):
    def write(kind, file, **columns):
        path = tmp_path / "data" / "h100_sxm" / kind / "vllm" / "0.9.1" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)

    attention = {
        "kv_cache_dtype": ["bfloat16", "fp8", "bfloat16", "bfloat16"],
        "head_dim": [128, 128, 64, 128],
        "window_size": [0, 0, 0, 4096],
        "batch_size": [2, 3, 4, 5],
        "num_heads": [32, 33, 34, 35],
        "num_key_value_heads": [8, 9, 10, 11],
        "isl": [70, 71, 72, 73],
        "step": [90, 91, 92, 93],
        "latency": [0.5, 1.0, 1.0, 1.0],
    }
    sources = {"generation": "flash_attn", "context": "vllm_fa3"}
    for file, kernel in sources.items():
        write(
            "attention", f"{file}_attention_perf.parquet", **attention, kernel_source=[kernel] * 4
        )
    experts = {
        "num_tokens": [1, 2, 3], "hidden_size": [4, 5, 6], "inter_size": [7, 8, 9],
        "topk": [10, 11, 12], "num_experts": [13, 14, 15], "moe_tp_size": [16, 17, 18],
        "moe_ep_size": [19, 20, 21], "moe_dtype": ["bfloat16", "fp8", "bfloat16"],
        "distribution": ["balanced", "balanced", "power_law"], "latency": [0.25, 1.0, 1.0],
    }  # fmt: skip
    write("moe", "moe_perf.parquet", **experts)
    write(
        "comm", "custom_allreduce_perf.parquet", num_gpus=[2, 2, 2, 4], kernel_source=[
            "vllm_graph", "vllm_eager", "vllm_graph", "vllm_eager",
        ], message_size=[16384, 16384, 32768, 16384], latency=[0.01, 0.0175, 0.02, 1.0],
    )  # fmt: skip
    found = {table.kind: table for table in aiconfigurator_tables(tmp_path)}
    assert set(found) == {"decode", "prefill", "experts", "all_reduce", "launch"}
    assert {table.gpu for table in found.values()} == {"h100-80gb"}
    names = "rows", "heads", "kv_heads", "packs", "us"
    assert rows_of(found["decode"], "context", *names) == [(90, 2, 32, 8, 0, 500)]
    assert rows_of(found["prefill"], "new", "cached", *names) == [(70, 90, 2, 32, 8, 1, 500)]
    names = "tokens", "hidden", "width", "top", "experts", "slices", "shares", "even", "us"
    assert rows_of(found["experts"], *names) == [(1, 4, 7, 10, 13, 16, 19, 1, 250)]
    assert rows_of(found["all_reduce"], "bytes", "devices", "us") == [
        (32768, 2, 10), (65536, 2, 20),
    ]  # fmt: skip
    # Outside a graph 16,384 numbers, which are 32 KiB, took 7.5 us more.
    assert found["launch"].columns["us"].tolist() == [7.5]


def test_learn_command_without_a_folder_says_what_is_missing(tmp_path):
    result = CliRunner().invoke(app, ["profile", "learn", "-o", str(tmp_path / "k.json")])
    assert result.exit_code != 0
    assert not (tmp_path / "k.json").exists()
