import gzip
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from schedlab.experiments.running import prediction
from schedlab.experiments.running.prediction import _rounded
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies.predictors import registry, text_model
from schedlab.policies.predictors.bert_errors import PREDICTIONS, count_predictions
from schedlab.policies.predictors.predictor import PredictionInputs
from schedlab.sim.errors import SpecError
from schedlab.sim.rng import stream
from schedlab.traces.trace import Trace
from tests.data_folder import data_folder

TRUE = np.maximum(1, stream(7, "lengths").exponential(200, 4_000)).astype(np.int64)


def predict(name, output_tokens=TRUE, seed=0, **params):
    inputs = PredictionInputs(
        prompt_tokens=np.full(len(output_tokens), 100),
        output_tokens=np.asarray(output_tokens),
        rng=stream(seed, "predictor"),
    )
    return registry.make(name, **params).predict(inputs)


def kendall_tau(one, other):
    """Return tau-b of the first 2,000: agreement of the order of pairs that differ in both."""
    ranks = [
        np.unique(values[:2_000], return_inverse=True)[1].astype(np.int16)
        for values in (one, other)
    ]
    first, second = (np.sign(np.subtract.outer(r, r)) for r in ranks)
    pairs = np.sqrt(np.count_nonzero(first) * np.count_nonzero(second))
    return (first * second).sum(dtype=np.int64) / pairs


def test_oracle_predicts_the_true_lengths():
    assert np.array_equal(predict("oracle"), TRUE)


def test_predictor_of_ones_own_is_named_by_module_and_class(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_predictor.py").write_text(
        "from schedlab.policies.predictors.predictor import Predictor\n"
        "class Twice(Predictor):\n"
        "    def __init__(self, factor=2.0, latency_s=0.0):\n"
        "        super().__init__(latency_s)\n"
        "        self.factor = factor\n"
        "    def predict(self, inputs):\n"
        "        return inputs.output_tokens * self.factor\n"
    )
    assert np.array_equal(predict("own_predictor:Twice", factor=3.0), TRUE * 3)
    workload = {"trace": "fixed", "num_requests": 4}
    named = {"name": "sjf", "predictor": {"name": "own_predictor:Twice", "factor": 3.0}}
    result = run(make_spec({"workload": workload, "policy": named}))
    assert result.provenance["prediction"]["predictor"] == "own_predictor:Twice"
    with pytest.raises(SpecError, match="no Predictor class 'Twcie'"):
        registry.predictor_class("own_predictor:Twcie")


def run_predictor(tmp_path, monkeypatch, body, hook="predict(self, inputs)"):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_predictor", raising=False)
    (tmp_path / "odd_predictor.py").write_text(
        "import numpy as np\n"
        "from schedlab.policies.predictors.oracle import Oracle\n"
        f"class Odd(Oracle):\n    def {hook}:\n        {body}\n"
    )
    named = {"name": "sjf", "predictor": "odd_predictor:Odd"}
    return run(make_spec({"workload": {"trace": "fixed", "num_requests": 3}, "policy": named}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "predict() returned None, expected an array of 3 numbers"),
        ("return 5", "predict() returned 5, expected an array of 3 numbers"),
        ("return []", "predict() returned [], expected an array of 3 numbers"),
        ("return [1, 2, 3, 4]", "predict() returned [1, 2, 3, 4], expected an array of 3 numbers"),
        ("return [[1], [2], [3]]", "predict() returned [[1], [2], [3]], expected"),
        ("return [[1], [2, 3], []]", "predict() returned [[1], [2, 3], []], expected"),
        ("return ['1', '2', '3']", "predict() returned ['1', '2', '3'], expected"),
        ("return [1, 2, 3j]", "predict() returned [1, 2, 3j], expected"),
        ("return [1, 2, 10**400]", "expected an array of 3 numbers"),
        ("yield 3", "predict() returned <generator object Odd.predict"),
        ("return [1, np.inf, 3]", "predict() says inf of request 1, which is no number of -1e+15"),
        ("raise ValueError('x')", "predict() raised ValueError: x (odd_predictor.py:5)"),
        ("exit(3)", "predict() raised SystemExit: 3 (odd_predictor.py:5)"),
    ],
)
def test_predictor_of_ones_own_that_gives_no_number_of_each_is_named(
    tmp_path, monkeypatch, body, message
):
    with pytest.raises(SpecError) as caught:
        run_predictor(tmp_path, monkeypatch, body)
    assert str(caught.value).startswith("predictor Odd: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "body", "message"),
    [
        ("describe(self)", "return 5", "describe() gives 5, expected a dict"),
        ("describe(self)", "return {1: 1j}", "describe() gives {1: 1j}, which JSON cannot hold"),
        ("describe(self)", "1 / 0", "describe() raised ZeroDivisionError: division by zero (odd_"),
        ("delay_s(self, arrival_ns)", "return 1.0", "delay_s() returned 1.0, expected an array"),
        ("refine(self, inputs)", "1 / 0", "refine() raised ZeroDivisionError"),
    ],
)
def test_other_hook_of_a_predictor_that_fails_is_named(tmp_path, monkeypatch, hook, body, message):
    with pytest.raises(SpecError) as caught:
        run_predictor(tmp_path, monkeypatch, body, hook)
    assert f"predictor Odd: {message}" in str(caught.value)


@pytest.mark.parametrize("body", ["return [3, 2, 1]", "return np.array([3, 2, 1], np.float32)"])
def test_predictor_may_give_numbers_of_any_kind(tmp_path, monkeypatch, body):
    assert run_predictor(tmp_path, monkeypatch, body).metrics()["completed"] == 3


def test_constant_predicts_the_same_for_all():
    assert set(predict("constant", tokens=99.0)) == {99.0}


def test_noisy_without_sigma_is_the_oracle():
    assert np.array_equal(predict("noisy", sigma=0.0), TRUE)


def test_noisy_error_is_lognormal_of_the_given_sigma():
    error = np.log(predict("noisy", sigma=0.5, factor=2.0) / TRUE)
    # 4,000 draws: the standard error of the mean is 0.008, of the deviation 0.006.
    assert error.mean() == pytest.approx(np.log(2.0), abs=0.03)
    assert error.std() == pytest.approx(0.5, abs=0.025)


@pytest.mark.parametrize("tau", [0.0, 0.24, 0.54, 0.74, 1.0])
def test_noisy_reaches_the_rank_correlation_asked_for(tau):
    reached = kendall_tau(predict("noisy", kendall_tau=tau), TRUE)
    assert reached == pytest.approx(tau, abs=0.03)


def test_noisy_by_rank_keeps_the_distribution_of_lengths():
    predicted = predict("noisy", kendall_tau=0.5)
    for q in (0.1, 0.5, 0.9):
        assert np.quantile(predicted, q) == pytest.approx(np.quantile(TRUE, q), rel=0.1)


def test_noisy_predictions_of_a_seed_are_the_same_twice_and_others_differ():
    first, again = predict("noisy", sigma=0.5, seed=3), predict("noisy", sigma=0.5, seed=3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, predict("noisy", sigma=0.5, seed=4))


def test_bucketed_puts_each_length_into_its_quantile_bucket():
    lengths = np.arange(1, 101)
    predicted = predict("bucketed", lengths, num_buckets=4)
    # Quartiles of 1..100; each bucket speaks with its middle.
    assert sorted(set(predicted)) == pytest.approx([13.375, 38.125, 62.875, 87.625])
    assert [int((predicted == p).sum()) for p in sorted(set(predicted))] == [25, 25, 25, 25]


def test_bucketed_puts_a_length_at_an_edge_into_the_bucket_that_ends_there():
    # Quartiles 2, 4 and 6, and every length lies on one of them or at an end.
    lengths = np.array([0, 2, 4, 6, 8])
    assert predict("bucketed", lengths, num_buckets=4).tolist() == [1.0, 1.0, 3.0, 5.0, 7.0]


def test_bucketed_with_half_accuracy_is_wrong_half_of_the_time_and_by_one_bucket():
    right = predict("bucketed", num_buckets=5)
    wrong = predict("bucketed", num_buckets=5, accuracy=0.5)
    middles = sorted(set(right))
    shift = np.searchsorted(middles, wrong) - np.searchsorted(middles, right)
    assert (shift == 0).mean() == pytest.approx(0.5, abs=0.03)
    assert set(shift) == {-1, 0, 1}


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("middle", [100, 100, 300, 300, 500]),
        ("lower", [1, 1, 200, 200, 400]),  # TetriInfer's, and never less than a token
        ("upper", [200, 200, 400, 400, 600]),  # S3's
    ],
)
def test_bucketed_of_a_width_says_the_middle_or_an_end(says, told):
    lengths = np.array([1, 199, 200, 399, 400])
    assert predict("bucketed", lengths, bucket_tokens=200, says=says).tolist() == told


def test_bucketed_of_a_width_is_wrong_by_one_bucket_also_where_there_is_one():
    lengths = np.array([0, 200, 400])
    assert set(predict("bucketed", lengths, bucket_tokens=200, accuracy=0.0)) <= {100, 300, 500}
    assert predict("bucketed", lengths, bucket_tokens=500, accuracy=0.0).tolist() == [750.0] * 3


def test_bucketed_of_equal_mass_says_the_edges_of_the_quantiles():
    lengths = np.array([1, 2, 4, 6, 8])
    assert predict("bucketed", lengths, num_buckets=4, says="lower").tolist() == [1, 1, 2, 4, 6]
    assert predict("bucketed", lengths, num_buckets=4, says="upper").tolist() == [2, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("orakel", {}, r"did you mean oracle\?"),
        ("noisy", {}, "exactly one of sigma and kendall_tau"),
        ("noisy", {"sigma": 0.1, "kendall_tau": 0.5}, "exactly one"),
        ("noisy", {"sigma": -1.0}, "sigma must be"),
        ("noisy", {"sigma": 1e18}, "sigma must be"),
        ("noisy", {"kendall_tau": 1.5}, "kendall_tau must be"),
        ("noisy", {"sigma": 0.1, "factor": 0.0}, "factor"),
        ("bucketed", {"num_buckets": 1}, "at least 2"),
        ("bucketed", {"accuracy": 2.0}, "accuracy"),
        ("bucketed", {"bucket_tokens": 0}, "bucket_tokens must be at least 1"),
        ("bucketed", {"says": "end"}, "says must be middle, lower or upper"),
        ("constant", {"tokens": 0.0}, "tokens must be"),
        ("oracle", {"sigma": 0.1}, "no parameter 'sigma'"),
        ("oracle", {"latency_s": -1.0}, "latency_s"),
        ("bert_errors", {"path": "nowhere.csv"}, "no such table of predictions: nowhere.csv"),
        ("trained", {}, "model"),
        ("trained", {"model": "nowhere"}, "no model folder nowhere"),
    ],
)
def test_predictor_on_bad_parameters_says_what_is_wrong(name, params, message):
    with pytest.raises(SpecError, match=message):
        registry.make(name, **params)


def test_bert_errors_order_lengths_as_well_as_the_real_classifier_did():
    reached = kendall_tau(predict("bert_errors"), TRUE)
    # 0.633 by the published predictions; 2,000 draws have a standard error of 0.01.
    assert reached == pytest.approx(0.633, abs=0.025)


def test_bert_errors_say_one_of_five_lengths_and_charge_the_measured_time():
    predicted = predict("bert_errors", np.arange(1, 1001))
    assert len(set(predicted)) == 5
    assert registry.make("bert_errors").cost_s == 0.0079


def test_bert_errors_of_equal_lengths_predict_that_length():
    assert set(predict("bert_errors", np.full(100, 7))) == {7.0}


def test_bert_errors_from_a_table_draw_its_confusion(tmp_path):
    path = tmp_path / "classes.csv"
    rows = [f"{length},{4 if length > 500 else 0}" for length in range(1, 1001)]
    path.write_text("output_token_length,predicted_class5\n" + "\n".join(rows) + "\n")
    predicted = predict("bert_errors", np.arange(1, 101), path=str(path))
    assert predicted[:50] == pytest.approx(np.full(50, predicted[0]))
    assert predicted[50:] == pytest.approx(np.full(50, predicted[-1]))
    assert predicted[0] == pytest.approx(25.75)
    assert predicted[-1] == pytest.approx(75.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("length,predicted_class5\n1,0\n", r"classes.csv:2: no column 'output_token_length'"),
        ("output_token_length,predicted_class5\n1,7\n", r"classes.csv:2: class 7"),
        ("output_token_length,predicted_class5\n1,0\nx,0\n", r"classes.csv:3: .*'x'"),
        ("output_token_length,predicted_class5\n1,0\n", "1 predictions"),
        ("output_token_length,predicted_class5\n" + "5,0\n" * 20, "too many equal lengths"),
    ],
)
def test_bert_errors_on_a_bad_table_names_the_line(tmp_path, text, message):
    path = tmp_path / "classes.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        predict("bert_errors", path=str(path))


@pytest.mark.parametrize(
    ("name", "is_packed"),
    [
        ("table.csv", False), ("table", False), ("answers.gz.csv", False),
        ("table.csv.gz", True), ("table.gz", True), ("answers.v2.csv.gz", True),
    ],
)  # fmt: skip
def test_bert_errors_table_is_unpacked_where_its_name_ends_in_gz(tmp_path, name, is_packed):
    rows = "".join(f"{length},{length % 5}\n" for length in range(1, 21))
    text = "output_token_length,predicted_class5\n" + rows
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if is_packed else text.encode())
    expected = np.zeros((10, 5), dtype=np.int64)
    for length in range(1, 21):
        expected[(length - 1) // 2, length % 5] += 1
    assert np.array_equal(count_predictions(path), expected)


@pytest.mark.slow
def test_bert_errors_table_in_the_program_is_that_of_the_published_predictions():
    path = data_folder() / "length_prediction" / "vicuna13b_bert_length_classes.csv.gz"
    assert np.array_equal(count_predictions(path), np.array(PREDICTIONS))


def test_delay_is_the_latency_unless_predictions_wait_for_each_other():
    arrival_ns = np.array([0, 0, 0, 10_000_000_000])
    predictor = registry.make("bert_errors", latency_s=1.0)
    assert predictor.delay_s(arrival_ns).tolist() == [1, 1, 1, 1]
    predictor = registry.make("bert_errors", latency_s=1.0, one_at_a_time=True)
    assert predictor.delay_s(arrival_ns).tolist() == [1, 2, 3, 1]


def test_delay_one_at_a_time_never_reorders_close_arrivals():
    arrival_ns = np.cumsum(stream(3, "gaps").integers(0, 3, 2_000))
    predictor = registry.make("bert_errors", latency_s=1e-9, one_at_a_time=True)
    ready_ns = arrival_ns + np.rint(predictor.delay_s(arrival_ns) * 1e9).astype(np.int64)
    assert (np.diff(ready_ns) >= 1).all()
    assert (ready_ns > arrival_ns).all()


def test_predictors_document_lists_every_predictor_and_knob():
    text = (Path(__file__).resolve().parents[2] / "docs" / "predictors.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", text.split("## Train one")[0], re.M))
    assert sorted(rows) == registry.names()
    for name in registry.names():
        for knob in registry.predictor_class(name).knobs():
            assert f"`{knob}`" in rows[name], f"{knob} of {name}"


@pytest.mark.parametrize("name", sorted(set(registry.names()) - {"trained"}))
def test_predictor_constructor_only_stores_its_parameters(name):
    params = {"sigma": 0.3} if name == "noisy" else {}
    predictor = registry.make(name, **params)
    assert predictor.get_params() == {
        **{k: p.default for k, p in registry.predictor_class(name).knobs().items()},
        **params,
    }


def test_features_are_scaled_before_the_network_sees_them(monkeypatch):
    plain = np.array([[3.0, 10.0], [1.0, 0.0]])
    monkeypatch.setattr(text_model, "plain_features", lambda prompts, sentences: plain)
    arrays = {
        "mean": np.array([1.0, 4.0]), "deviation": np.array([2.0, 3.0]),
        "hidden": np.eye(2), "hidden_bias": np.array([0.5, 0.0]),
        "output": np.array([[1.0], [10.0]]), "output_bias": np.array([7.0]),
    }  # fmt: skip
    model = text_model.TextModel("listmle", "minilm", arrays)
    model.__dict__["_sentences"] = None
    # (1, 2) and (0, -4 / 3), the negative one cut off.
    assert model.outputs(None).tolist() == [[1.5 + 20 + 7], [0.5 + 7]]


def test_predictions_that_differ_by_the_last_bits_of_an_exponential_are_the_same():
    lengths = np.array([0.0, 1.0, 2.0**40 + 1, 123.456, 1e300, -7.25, np.inf])
    shaken = np.nextafter(lengths, np.inf)
    kept = _rounded(lengths)
    assert (_rounded(shaken)[1:] == kept[1:]).all()
    assert kept == pytest.approx(lengths, rel=2**-32)
    assert kept[[0, 1, 5]].tolist() == [0.0, 1.0, -7.25]


def test_predictor_is_given_each_column_of_the_workload_and_its_own_stream(monkeypatch):
    asked = []

    class Says:
        one_at_a_time = True

        def predict(self, inputs):
            asked.append(inputs)
            return np.array([3.0, 1.0, 2.0])

        def delay_s(self, arrival_ns):
            return arrival_ns / 1e9

        def describe(self):
            return {"said": 1}

        def refine(self, inputs):
            return ("refined", inputs)

    monkeypatch.setattr(prediction.predictors, "make", lambda name, **knobs: Says())
    trace = Trace(
        prompt_tokens=np.array([4, 5, 6]), output_tokens=np.array([3, 2, 9]),
        arrival_ns=np.array([0, 10**9, 2 * 10**9]), session=np.array(["s", "t", "u"], object),
        application=np.array(["a", "b", "c"], object), prompt=np.array(["p", "q", "r"], object),
        tenant=np.array(["x", "y", "z"], object),
    )  # fmt: skip
    spec = make_spec({
        "seed": 5, "policy": {"name": "sjf", "predictor": "oracle"},
        "workload": {"trace": "azure-conv", "num_requests": 3},
    })  # fmt: skip
    found = prediction.predictions(spec, trace)
    (inputs,) = asked
    told = [
        column.tolist()
        for column in (
            inputs.prompt_tokens, inputs.output_tokens, inputs.application, inputs.prompt
        )
    ]  # fmt: skip
    assert told == [[4, 5, 6], [3, 2, 9], ["a", "b", "c"], ["p", "q", "r"]]
    assert inputs.prompt_ids is None
    assert inputs.rng.random() == stream(5, "predictor").random()
    assert found.predicted_tokens.tolist() == [3.0, 1.0, 2.0]
    assert found.delay_s.tolist() == [0.0, 1.0, 2.0]
    assert found.refinements == ("refined", inputs)
    assert found.provenance == {
        "predictor": "oracle", "kendall_tau": pytest.approx(1 / 3),
        "mean_absolute_error_tokens": pytest.approx(8 / 3), "said": 1, "mean_delay_s": 1.0,
        "learned_from_this_trace": False,
    }  # fmt: skip
    loop = spec.model_copy(
        update={"workload": spec.workload.model_copy(update={"max_concurrency": 2})}
    )
    with pytest.raises(SpecError, match="one_at_a_time: when a closed loop"):
        prediction.predictions(loop, trace)
