"""Trained models that only predict: what they say, what they refuse, what they cost."""

import hashlib
import json
import math

import numpy as np
import pytest

from schedlab.experiments.results.tables import warnings
from schedlab.experiments.running.prediction import _agreement, prediction_line
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.training.train import write_model
from schedlab.policies.predictors import registry
from schedlab.policies.predictors.forest import Forest
from schedlab.policies.predictors.forest import features as forest_columns
from schedlab.policies.predictors.model_folder import ModelFolder
from schedlab.policies.predictors.predictor import PredictionInputs
from schedlab.policies.predictors.prompts import Prompts, prompts
from schedlab.policies.predictors.serving_time import ServingTime, logarithms
from schedlab.policies.predictors.text_features import COUNTS, bags, counts, hashed_ngrams, rarities
from schedlab.policies.predictors.text_model import SLOPE_TOKENS, TextModel
from schedlab.sim.errors import SpecError
from schedlab.sim.rng import stream
from tests.trained_models import chars_plus_one


@pytest.fixture
def model(tmp_path):
    return chars_plus_one(tmp_path / "model")


def inputs(*text):
    column = None if text == (None,) else np.array(text, dtype=object)
    return PredictionInputs(
        prompt_tokens=np.full(len(text), 5),
        output_tokens=np.full(len(text), 7),
        rng=stream(0, "predictor"),
        prompt=column,
    )


def text_trace(path, texts, output_tokens=20):
    rows = [{"prompt": text, "prompt_tokens": 10, "output_tokens": output_tokens} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_trained_predicts_from_the_text_and_not_from_the_true_length(model):
    predictor = registry.make("trained", model=str(model))
    assert predictor.predict(inputs("abc", "abcdefghi", "")) == pytest.approx([4, 10, 1])


def test_trained_costs_what_was_measured_unless_told_otherwise(model):
    assert registry.make("trained", model=str(model)).cost_s == 0.002
    assert registry.make("trained", model=str(model), latency_s=0.5).cost_s == 0.5


def test_trained_without_text_names_the_formats_that_have_it(model):
    predictor = registry.make("trained", model=str(model))
    with pytest.raises(SpecError, match=r"no text; .*sharegpt, vllm_custom, schedlab"):
        predictor.predict(inputs(None))
    with pytest.raises(SpecError, match=r"1 of 2 requests have no text \(row 1 is the first"):
        predictor.predict(inputs("abc", None))


def break_meta(folder, **changes):
    path = folder / "meta.json"
    meta = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in meta.items() if v is not None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 9}, "model schema 9, this version reads 1"),
        ({"kind": None}, "key 'kind' is missing"),
        ({"kind": "knn"}, "is a model of kind knn; wanted is buckets or"),
        ({"encoder": None}, "key 'encoder' is missing"),
        ({"weights_sha256": "0"}, "is not the file that meta.json was written for"),
    ],
)
def test_trained_with_another_meta_says_what_is_wrong(model, changes, message):
    break_meta(model, **changes)
    with pytest.raises(SpecError, match=message):
        registry.make("trained", model=str(model)).predict(inputs("abc"))


def test_trained_on_a_folder_that_is_no_model_says_so(tmp_path):
    with pytest.raises(SpecError, match=r"no trained model: it has no meta.json"):
        registry.make("trained", model=str(tmp_path))


def test_trained_with_an_array_missing_names_it(model):
    with np.load(model / "weights.npz") as stored:
        arrays = {name: stored[name] for name in stored.files if name != "hidden"}
    np.savez(model / "weights.npz", **arrays)
    digest = hashlib.sha256((model / "weights.npz").read_bytes()).hexdigest()
    break_meta(model, weights_sha256=digest)
    with pytest.raises(SpecError, match="array 'hidden' is missing"):
        registry.make("trained", model=str(model)).predict(inputs("abc"))


def test_trained_refuses_pickled_arrays(model):
    np.savez(model / "weights.npz", hidden=np.array([{}], dtype=object))
    digest = hashlib.sha256((model / "weights.npz").read_bytes()).hexdigest()
    break_meta(model, weights_sha256=digest)
    with pytest.raises(SpecError, match="not readable as arrays"):
        registry.make("trained", model=str(model)).predict(inputs("abc"))


def test_trained_without_a_report_asks_for_the_latency(model):
    (model / "report.json").write_text("{}")
    with pytest.raises(SpecError, match="give latency_s yourself"):
        registry.make("trained", model=str(model))
    assert registry.make("trained", model=str(model), latency_s=0.0).cost_s == 0.0


def test_spec_with_a_wrong_model_folder_fails_before_the_run():
    workload = {"trace": "fixed", "num_requests": 3, "request_rate": 1}
    policy = {"name": "ltr", "predictor": {"name": "trained", "model": "no/such"}}
    with pytest.raises(SpecError, match=r"policy\.predictor: no model folder .*no/such"):
        make_spec({"workload": workload, "policy": policy})


def ltr_spec(model, trace, **predictor):
    return make_spec(
        {
            "policy": {
                "name": "ltr",
                "predictor": {"name": "trained", "model": str(model), **predictor},
            },
            "workload": {"trace": str(trace), "request_rate": "inf"},
            "engine": {"max_num_seqs": 1},
        }
    )


def test_run_serves_prompts_in_the_order_a_trained_predictor_says(model, tmp_path):
    trace = text_trace(tmp_path / "t.jsonl", ["word" * n for n in (5, 1, 4, 2, 3)])
    result = run(ltr_spec(model, trace))
    assert np.argsort(result.requests["finish_ns"]).tolist() == [1, 3, 4, 2, 0]


def test_run_charges_the_prediction_before_a_request_can_be_scheduled(model, tmp_path):
    trace = text_trace(tmp_path / "t.jsonl", ["a", "bb", "ccc"])
    free = run(ltr_spec(model, trace, latency_s=0.0)).requests
    charged = run(ltr_spec(model, trace)).requests
    assert charged["first_scheduled_ns"].min() == free["first_scheduled_ns"].min() + 2_000_000
    queued = run(ltr_spec(model, trace, latency_s=10.0, one_at_a_time=True)).requests
    assert queued["first_scheduled_ns"].tolist() == [10**10, 2 * 10**10, 3 * 10**10]


def test_run_tells_predictor_quality_and_cost(model, tmp_path):
    trace = text_trace(tmp_path / "t.jsonl", ["a", "bb", "ccc"])
    prediction = run(ltr_spec(model, trace)).provenance["prediction"]
    assert prediction["latency_s"] == prediction["mean_delay_s"] == 0.002
    assert prediction["kind"] == "pointwise"
    assert prediction["mean_absolute_error_tokens"] == pytest.approx((18 + 17 + 16) / 3)
    line = prediction_line([prediction | {"kendall_tau": tau} for tau in (0.4, 0.6, None)])
    assert line == (
        "predictor: trained (pointwise), Kendall tau 0.50 on this workload, 2 ms a prediction"
    )
    assert "no order" in prediction_line([prediction | {"kendall_tau": None}])


def test_run_on_the_training_file_warns(tmp_path):
    trace = text_trace(tmp_path / "t.jsonl", ["a", "bb", "ccc"])
    digest = hashlib.sha256(trace.read_bytes()).hexdigest()
    model = chars_plus_one(tmp_path / "model", data={"file": "t.jsonl", "sha256": digest})
    assert any(
        "learned from prompts of this very trace" in w
        for w in warnings(run(ltr_spec(model, trace)))
    )
    other = text_trace(tmp_path / "other.jsonl", ["a", "bb", "cccc"])
    assert not any("learned" in w for w in warnings(run(ltr_spec(model, other))))


def test_run_in_a_closed_loop_refuses_predictions_one_at_a_time(model, tmp_path):
    trace = text_trace(tmp_path / "t.jsonl", ["a", "bb", "ccc"])
    spec = ltr_spec(model, trace, one_at_a_time=True)
    closed = spec.model_copy(
        update={"workload": spec.workload.model_copy(update={"max_concurrency": 1})}
    )
    with pytest.raises(SpecError, match="one_at_a_time"):
        run(closed)


def test_text_model_of_ranks_maps_scores_to_lengths_in_order():
    arrays = {
        "score_quantiles": np.array([-1.0, 0.0, 1.0]),
        "length_quantiles": np.array([10.0, 10.0, 50.0]),
    }
    ranks = TextModel("listmle", "hashed", arrays)
    got = ranks._lengths(np.array([[-9.0], [-0.5], [0.0], [0.5], [9.0]]))
    assert got == pytest.approx([10, 10, 10, 30, 50], abs=0.01)
    assert (np.diff(got) > 0).all()


@pytest.mark.parametrize("kind", ["pointwise", "listmle"])
def test_text_model_works_lengths_out_in_double_precision(kind):
    texts = ["a", "write a poem", "why? " * 30]
    width, few = len(COUNTS), 8
    rng = np.random.default_rng(4)
    shapes = {
        "mean": width, "deviation": width, "embedding": (few, 3), "rarity": few,
        "hidden": (width + 3, 5), "hidden_bias": 5, "output": (5, 1), "output_bias": 1,
    }  # fmt: skip
    arrays = {key: rng.uniform(0.5, 1.0, size).astype("f4") for key, size in shapes.items()}
    arrays["mean"] = np.zeros(width, "f4")
    arrays["deviation"] = np.full(width, 1000.0, "f4")
    arrays["score_quantiles"] = np.array([0.0, 30.0])
    arrays["length_quantiles"] = np.array([1.0, 3000.0])
    model = TextModel(kind, "hashed", arrays)
    asked = Prompts(texts, np.full(3, 5), [None] * 3)
    scores = model.outputs(asked)
    assert scores.dtype == np.float32
    assert len(set(scores[:, 0].tolist())) == 3
    lengths = model.lengths(asked)
    assert lengths.dtype == np.float64
    for score, length in zip(scores[:, 0].tolist(), lengths.tolist(), strict=True):
        if kind == "pointwise":
            assert length == pytest.approx(math.exp(score), rel=1e-14)
        else:
            known = 1.0 + (3000.0 - 1.0) * score / 30.0
            assert length == pytest.approx(known + SLOPE_TOKENS * score, rel=1e-14)


def test_text_model_of_buckets_says_the_length_of_the_likeliest():
    buckets = TextModel("buckets", "hashed", {"bucket_tokens": np.array([5.0, 50.0, 500.0])})
    assert buckets._lengths(np.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])).tolist() == [50.0, 5.0]


def test_hashed_ngrams_share_buckets_between_texts_with_common_words():
    first, second = hashed_ngrams("Write a poem", 1 << 20), hashed_ngrams("read a poem", 1 << 20)
    assert len(set(first) & set(second)) > 3
    assert set(first) != set(second)
    assert hashed_ngrams("", 8).tolist() == []
    assert hashed_ngrams("\ud800 lone surrogate", 8).max() < 8


def test_counts_of_a_prompt_are_what_their_names_say():
    got = dict(zip(COUNTS, counts("Add 12 to $x$?\nNow"), strict=True))
    expected = {"characters": 18, "words": 5, "digits": 2, "lines": 1, "marks": 3}
    expected |= {"formulas": 2, "capitals": 2}
    for name, number in expected.items():
        assert got[name] == pytest.approx(np.log1p(number)), name
    assert (got["word_length"], got["asks"]) == (pytest.approx(14 / 5), 1.0)


def test_bags_weigh_rare_ngrams_more_and_add_up_to_one():
    ngrams = [np.array([0, 1]), np.array([0, 2]), np.array([0, 1]), np.array([0])]
    rarity = rarities(ngrams, 4)
    assert rarity.tolist() == pytest.approx([1.0, np.log(5 / 3) + 1, 0.0, 0.0])
    packed = bags(ngrams, rarity)
    assert np.diff(packed.offset).tolist() == [2, 1, 2, 1]
    table = np.eye(4, dtype=np.float32)
    sums = packed.sums(table)
    assert (sums**2).sum(axis=1) == pytest.approx(np.ones(4))
    assert sums[0, 1] > sums[0, 0] > 0
    assert np.array_equal(packed.take(np.array([3, 0])).sums(table), sums[[3, 0]])


def test_bags_of_many_prompts_sum_as_each_alone():
    rng = stream(0, "bags")
    ngrams = [np.unique(rng.integers(0, 50, rng.integers(0, 6))) for _ in range(2_500)]
    packed = bags(ngrams, np.arange(50) / 10)
    table = rng.standard_normal((50, 3)).astype(np.float32)
    rows = np.arange(0, 2_500, 97)
    alone = np.concatenate([packed.take(np.array([row])).sums(table) for row in rows])
    assert packed.sums(table)[rows] == pytest.approx(alone, rel=1e-6)


def test_bags_of_a_prompt_without_known_ngrams_sum_to_nothing():
    packed = bags([np.array([1]), np.array([], dtype=np.int64)], np.zeros(4))
    assert packed.sums(np.ones((4, 2), dtype=np.float32)).tolist() == [[0, 0], [0, 0]]


def test_forest_means_what_its_trees_say():
    # Tree 1: column 0 (log length) <= 2 ? 10 : 20. Tree 2: a leaf that says 40.
    arrays = {
        "rarity": np.zeros(4),
        "projection": np.zeros((4, 1), dtype=np.float32),
        "roots": np.array([0, 3]),
        "feature": np.array([0, -1, -1, -1]),
        "threshold": np.array([2.0, 0, 0, 0]),
        "left": np.array([1, 0, 0, 0]),
        "right": np.array([2, 0, 0, 0]),
        "value": np.array([0.0, 10, 20, 40]),
    }
    two = Prompts(["a", "b"], np.array([1, 100]), ["chat", None])
    assert Forest(["chat"], arrays).lengths(two).tolist() == [25.0, 30.0]


def test_serving_time_of_a_batch_seen_before_is_what_it_took():
    shapes = np.array([[1, 100, 10], [8, 100, 10], [8, 100, 100], [16, 500, 100]], dtype=float)
    seen = logarithms(shapes)
    took = np.array([1.0, 2.0, 9.0, 30.0])
    estimator = ServingTime(seen, seen.std(axis=0), took, num_neighbors=2)
    for shape, seconds in zip(shapes, took, strict=True):
        assert estimator.estimate_s(*shape) == pytest.approx(seconds)
    assert 2.0 < estimator.estimate_s(8, 100, 30) < 9.0


def test_prompts_have_no_output_length():
    columns = prompts(np.array(["a"], dtype=object), np.array([1]), None)
    assert not any("output" in name for name in Prompts.__dataclass_fields__)
    assert list(columns.application) == [None]


def test_errors_of_a_prediction_do_not_cancel_and_its_order_is_of_the_true_lengths():
    told = _agreement(np.array([1.0, 2.0, 6.0]), np.array([3, 4, 2]))
    assert told["mean_absolute_error_tokens"] == pytest.approx((2 + 2 + 4) / 3)
    assert told["kendall_tau"] == pytest.approx(-1 / 3)


def test_columns_of_a_forest_are_length_applications_counts_and_text_in_this_order():
    asked = Prompts(["Tell me.", "Why?", "x"], np.array([1, 9, 99]), ["code", None, "chat"])
    text = np.array([[0.5, 0.25], [1.5, 1.25], [2.5, 2.25]], dtype=np.float32)
    found = forest_columns(asked, ["chat", "code", "mail"], text)
    assert found.shape == (3, 1 + 3 + len(COUNTS) + 2)
    assert np.allclose(found[:, 0], np.log([2, 10, 100]))
    assert found[:, 1:4].tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0]]
    assert np.allclose(found[:, 4:-2], [counts(one) for one in asked.text])
    assert found[:, -2:].tolist() == text.tolist()
    assert forest_columns(asked, [], text).shape == (3, 1 + len(COUNTS) + 2)


@pytest.mark.parametrize("num_neighbors", [1, 2, 3, 9])
def test_serving_time_is_of_the_nearest_weighed_by_how_near_they_are(num_neighbors):
    rng = stream(3, "batches")
    seen = logarithms(rng.integers(1, 200, (6, 3)).astype(float))
    took = np.array([1.0, 20.0, 300.0, 4_000.0, 50_000.0, 600_000.0])
    scale = np.array([1.0, 2.0, 4.0])
    estimator = ServingTime(seen, scale, took, num_neighbors)
    for shape in rng.integers(1, 200, (20, 3)).tolist():
        away = [math.dist(row / scale, np.log(shape) / scale) for row in seen]
        near = sorted(range(6), key=away.__getitem__)[:num_neighbors]
        weights = [1.0 / (away[i] + 1e-9) for i in near]
        expected = sum(w * took[i] for w, i in zip(weights, near, strict=True)) / sum(weights)
        assert estimator.estimate_s(*shape) == pytest.approx(expected)


def test_serving_time_that_was_written_is_read_with_all_it_learnt(tmp_path):
    rng = stream(4, "written")
    arrays = {
        "batches": rng.random((6, 3)),
        "scale": rng.random(3),
        "serving_time_s": rng.random(6),
    }
    meta = {"kind": "knn", "num_neighbors": 4}
    write_model(tmp_path, meta, arrays, {"latency_s": {"median": 0.001}})
    found = ServingTime.load(str(tmp_path))
    assert found.num_neighbors == 4
    for name, values in arrays.items():
        assert getattr(found, name).tolist() == values.tolist(), name


def test_entry_of_a_model_folder_is_of_the_type_that_is_asked_for_or_refused(tmp_path):
    folder = ModelFolder(tmp_path, {"number": 3, "share": 0.5, "name": "a", "none": None})
    assert folder.get("number", int) == 3
    assert folder.get("share", (int, float)) == 0.5
    for key, kind in (("number", str), ("share", int), ("name", (int, float)), ("none", int),
                      ("nowhere", str)):  # fmt: skip
        with pytest.raises(SpecError, match=f"meta.json: key '{key}' is missing or of a wrong"):
            folder.get(key, kind)
