"""Training predictors: what they learn, what is reported, and the commands."""

import gzip
import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands import predictor as command
from schedlab.experiments.commands.app import app
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.training import batches, evaluate, network, train, trees
from schedlab.experiments.training.batches import read_batches
from schedlab.experiments.training.dataset import read_dataset
from schedlab.experiments.training.quality import (
    _resampled,
    application_means,
    kendall_tau,
    pairs_right,
    quality,
)
from schedlab.policies.predictors import registry, text_model
from schedlab.policies.predictors.predictor import PredictionInputs
from schedlab.policies.predictors.prompts import prompts
from schedlab.policies.predictors.text_model import TextModel
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.result import RunResult
from schedlab.sim.rng import stream
from tests.data_folder import data_folder

ANSWERS = {"in one word": 4, "in brief": 20, "in some detail": 80, "as a long essay": 400}
TOPICS = ("tea", "steel", "rivers", "clocks", "bees", "sleep", "glass", "music")


def answered(num_prompts=300, seed=0):
    """Return records whose answers are as long as the prompt asks, give or take a third."""
    rng = stream(seed, "answers")
    rows = []
    for i in range(num_prompts):
        wish = list(ANSWERS)[rng.integers(len(ANSWERS))]
        tokens = max(1, round(ANSWERS[wish] * rng.uniform(0.67, 1.5)))
        topic = TOPICS[rng.integers(len(TOPICS))]
        rows.append(
            {
                "application": "qa" if ANSWERS[wish] < 50 else "essay",
                "prompt": f"Tell me about {topic} number {i}, {wish}.",
                "prompt_tokens": 9,
                "output_tokens": tokens,
            }
        )
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "answers.jsonl", answered())


@pytest.fixture(scope="module")
def pointwise(data, tmp_path_factory):
    """Train once for those who ask something of a trained model: its folder and report."""
    folder = tmp_path_factory.mktemp("pointwise") / "model"
    return folder, trained(data, folder, "pointwise")


def schedlab(*arguments):
    return CliRunner().invoke(app, ["predictor", *(str(argument) for argument in arguments)])


def trained(data, folder, kind):
    pytest.importorskip("sklearn" if kind == "random_forest" else "torch")
    done = schedlab("train", data, "-o", folder, "--kind", kind, "--json", "-q")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def briefly(monkeypatch):
    """Learn for a few steps: for those who do not ask how well."""
    monkeypatch.setattr(network, "LEAST_STEPS", 10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["listmle", "pointwise", "buckets", "random_forest"])
def test_train_learns_to_order_unseen_prompts_and_saves_what_it_learned(
    data, tmp_path, kind, request
):
    if kind == "pointwise":
        folder, report = request.getfixturevalue("pointwise")
    else:
        folder = tmp_path / "model"
        report = trained(data, folder, kind)
    # The noise within the four wishes limits what can be known.
    assert report["test"]["kendall_tau"] > 0.6
    assert report["test"]["gain"]["pairs_right"] > 0.1
    predictor = registry.make("trained", model=str(folder))
    asked = np.array([f"Tell me about tea number 7, {wish}." for wish in ANSWERS], dtype=object)
    apps = np.array(["qa", "qa", "essay", "essay"], dtype=object)
    nothing = np.full(4, 1)
    inputs = PredictionInputs(np.full(4, 9), nothing, stream(0, "predictor"), apps, asked)
    said = predictor.predict(inputs)
    assert (np.diff(said) > 0).all()
    assert said[0] < 40
    assert said[-1] > 100
    assert predictor.cost_s == report["latency_s"]["median"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["listmle", "random_forest"])
def test_train_twice_gives_the_same_bytes_and_another_seed_does_not(tmp_path, kind, briefly):
    data = write(tmp_path / "answers.jsonl", answered(80))
    for name in ("first", "second"):
        trained(data, tmp_path / name, kind)
    for name in ("weights.npz", "meta.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    done = schedlab("train", data, "-o", tmp_path / "other", "--kind", kind, "--seed", 1, "-q")
    assert done.exit_code == 0
    other = (tmp_path / "other" / "weights.npz").read_bytes()
    assert other != (tmp_path / "first" / "weights.npz").read_bytes()


@pytest.mark.slow
def test_train_prints_agreement_within_applications_beside_their_mean(data, tmp_path, briefly):
    pytest.importorskip("torch")
    done = schedlab("train", data, "-o", tmp_path / "model", "--kind", "pointwise")
    for text in ("overall", "mean of the application", "within qa", "within essay", "tau-b"):
        assert text in done.output
    assert "a prediction takes" in done.output
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == {".schedlab.json", "meta.json", "report.json", "weights.npz"}


@pytest.mark.slow
def test_train_learning_curve_counts_what_learning_costs(tmp_path, monkeypatch, briefly):
    pytest.importorskip("torch")
    from schedlab.experiments.training import train

    monkeypatch.setattr(train, "CURVE_PROMPTS", (30, 8_000))
    rows = answered(150)
    report = trained(write(tmp_path / "a.jsonl", rows), tmp_path / "model", "pointwise")
    curve = report["learning_curve"]
    assert [point["num_prompts"] for point in curve] == [30, 120]
    tokens = [point["generated_tokens"] for point in curve]
    assert tokens == sorted(tokens)
    assert tokens[-1] < sum(row["output_tokens"] for row in rows)


@pytest.mark.slow
def test_evaluate_on_the_own_file_uses_the_prompts_kept_out(data, pointwise, tmp_path):
    folder, report = pointwise
    done = schedlab("evaluate", folder, data, "--json")
    assert json.loads(done.stdout)["test"] == report["test"]
    other = write(tmp_path / "other.jsonl", answered(100, seed=5))
    found = json.loads(schedlab("evaluate", folder, other, "--json").stdout)
    assert found["test"]["num_prompts"] == 100
    assert "application_mean" not in found["test"]
    assert "tested on all of other.jsonl" in found["notes"][0]


def test_report_tells_how_long_a_prediction_takes_and_what_is_to_be_known(capsys):
    report = {"kind": "knn", "test": {"mean_error_s": 0.25, "gain": None}, "notes": ["one", "two"]}
    command._print_report(report | {"latency_s": {"median": 0.0015, "p99": 0.02}})
    told = capsys.readouterr().out.splitlines()
    assert told[-3:] == [
        "a prediction takes 1.50 ms, P99 20.00 ms on this machine", "one", "two"
    ]  # fmt: skip
    assert [line.split() for line in told if "mean error s" in line or "gain" in line] == [
        ["mean", "error", "s", "0.25"], ["gain", "-"]
    ]  # fmt: skip


@pytest.mark.slow
def test_held_out_writes_a_trace_of_the_test_prompts(data, pointwise, tmp_path):
    folder, _ = pointwise
    out = tmp_path / "test.jsonl.gz"
    done = schedlab("held-out", folder, data, "-o", out)
    assert done.exit_code == 0, done.output
    read = read_dataset(data)
    written = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert [row["prompt"] for row in written] == [read.prompts.text[i] for i in read.test_rows]
    spec = make_spec(
        {
            "policy": {
                "name": "sjf",
                "predictor": {"name": "trained", "model": str(folder)},
            },
            "workload": {"trace": str(out), "request_rate": "inf"},
        }
    )
    assert run(spec).provenance["prediction"]["kendall_tau"] > 0.6
    done = schedlab("held-out", folder, out, "-o", tmp_path / "again.jsonl")
    assert "learned from answers.jsonl" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--encoder", "minlm"], "did you mean minilm?"),
        (["--encoder", "hf:/nowhere"], "holds no Hugging Face model"),
        (["--encoder", "minilm", "--kind", "knn"], "knn has no encoder"),
    ],
)
def test_train_with_a_wrong_encoder_says_so(data, tmp_path, arguments, message):
    if "hf:/nowhere" in arguments:
        pytest.importorskip("torch")
    done = schedlab("train", data, "-o", tmp_path / "model", *arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "model").exists()


def test_train_on_a_trace_without_text_names_formats_with_text(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n5,6\n")
    done = schedlab("train", path, "-o", tmp_path / "model")
    assert done.exit_code == 2
    assert "sharegpt, vllm_custom" in done.output


def test_train_on_too_few_prompts_says_how_many_are_needed(tmp_path):
    path = write(tmp_path / "few.jsonl", answered(20))
    assert "16 prompts to learn from" in schedlab("train", path, "-o", tmp_path / "m").output


def test_read_dataset_takes_the_split_of_the_file_else_draws_a_fifth_of_each_application(tmp_path):
    rows = answered(200)
    given = [row | {"split": "test" if i % 2 else "train"} for i, row in enumerate(rows)]
    read = read_dataset(write(tmp_path / "given.jsonl", given))
    assert read.is_test.tolist() == [bool(i % 2) for i in range(200)]
    assert read.split == "as given in the file"
    drawn = read_dataset(write(tmp_path / "drawn.jsonl", rows), seed=3)
    for name in ("qa", "essay"):
        inside = np.array([row["application"] == name for row in rows])
        assert drawn.is_test[inside].mean() == pytest.approx(0.2, abs=0.01)
    assert drawn.split.endswith("seed 3")


def test_pairs_right_counts_pairs_by_hand():
    predicted, true = np.array([1, 1, 2, 3]), np.array([10, 20, 30, 25])
    # Six pairs: right are (0,2) (0,3) (1,2) (1,3); (0,1) is held equal; (2,3) is wrong.
    tau = kendall_tau(predicted, true)
    assert tau == pytest.approx(3 / np.sqrt(5 * 6))
    assert pairs_right(tau, predicted, true) == pytest.approx(4.5 / 6)
    assert kendall_tau(np.ones(4), true) is None
    assert pairs_right(None, np.ones(4), true) is None


def test_quality_interval_holds_the_estimate_and_narrows_with_more_prompts():
    rng = stream(0, "quality")
    widths = []
    for n in (100, 1000):
        true = rng.exponential(100, n)
        predicted = true * np.exp(rng.standard_normal(n))
        found = quality(predicted, true, np.full(n, "a"), None)
        low, high = found["interval"]
        assert low < found["kendall_tau"] < high
        widths.append(high - low)
        assert found["by_application"] == {}
    # The width falls with the root of the number of prompts: by 3.2.
    assert 2.0 < widths[0] / widths[1] < 5.0


@pytest.mark.parametrize(("a", "b", "has_gain"), [(1, 1, True), (0, 1, False), (1, 0, False)])
def test_quality_has_no_gain_over_what_orders_nothing_nor_where_it_orders_nothing(a, b, has_gain):
    true = np.arange(6.0)
    found = quality(a * true, true, np.full(6, "x"), b * true[::-1])
    assert ("gain" in found) is has_gain
    assert found["kendall_tau"] == (pytest.approx(1.0) if a else None)
    assert found["application_mean"]["kendall_tau"] == (pytest.approx(-1.0) if b else None)


def test_quality_resamples_have_the_tau_of_the_rows_they_draw():
    from schedlab.experiments.training.quality import _concordance, _unequal_drawn_pairs

    rng = stream(1, "quality")
    x, y = rng.integers(0, 9, (2, 60)).astype(float)
    times = rng.multinomial(60, np.full(60, 1 / 60), 3).T.astype(np.float32)
    got = _concordance(x, y, times)
    got /= np.sqrt(_unequal_drawn_pairs(x, times) * _unequal_drawn_pairs(y, times))
    for i in range(3):
        rows = np.repeat(np.arange(60), times[:, i].astype(int))
        assert got[i] == pytest.approx(kendall_tau(x[rows], y[rows]))


def test_application_means_of_an_unseen_application_are_the_mean_of_all():
    true = np.array([1.0, 3.0, 8.0])
    means = application_means(true, np.array(["a", "a", "b"]), np.array(["b", "a", "new"]))
    assert means.tolist() == [8.0, 2.0, 4.0]


@pytest.mark.slow
def test_forest_is_that_of_scikit_learn():
    ensemble = pytest.importorskip("sklearn.ensemble")
    from schedlab.experiments.training.trees import nodes
    from schedlab.policies.predictors.forest import Forest

    rng = stream(0, "forest")
    columns = rng.standard_normal((200, 5)).astype(np.float32)
    grown = ensemble.RandomForestRegressor(n_estimators=7, random_state=0)
    grown.fit(columns, columns[:, 0] * 3 + rng.standard_normal(200))
    ours = Forest([], nodes(grown.estimators_)).trees(columns)
    assert ours == pytest.approx(grown.predict(columns), rel=1e-12)


def sealed_run(folder, **policy):
    spec = make_spec(
        {
            "policy": {"name": "magnus", "max_batch_size": 4, "predictor": "oracle"} | policy,
            "workload": {"trace": "azure-conv", "num_requests": 240, "request_rate": "inf"},
        }
    )
    result = run(spec)
    folder.mkdir()
    result.save(folder)
    return result


@pytest.mark.slow
def test_serving_time_estimator_learns_from_a_runs_batches_and_magnus_uses_it(tmp_path):
    result = sealed_run(tmp_path / "run")
    seen = read_batches(tmp_path / "run")
    assert seen.num_left_out == 0
    assert seen.shape[:, 0].sum() == 240
    assert seen.shape[:, 0].max() == 4
    # Batches do not overlap, so their times fill the run.
    assert seen.serving_time_s.sum() <= result.metrics()["duration_s"] * (1 + 1e-9)
    done = schedlab("train", tmp_path / "run", "-o", tmp_path / "knn", "--kind", "knn", "--json")
    assert done.exit_code == 0, done.output
    test = json.loads(done.stdout)["test"]
    assert test["kendall_tau"] > 0.4
    assert test["mean_absolute_error_s"] < test["mean_absolute_error_of_mean_s"] / 2
    done = schedlab("evaluate", tmp_path / "knn", tmp_path / "run")
    assert "serving times" in done.output
    with_estimator = sealed_run(tmp_path / "again", serving_time=str(tmp_path / "knn"))
    assert with_estimator.metrics()["completed"] == 240


@pytest.mark.slow
def test_serving_time_from_a_run_that_does_not_seal_batches_is_refused(tmp_path):
    spec = make_spec({"workload": {"trace": "fixed", "num_requests": 5, "request_rate": 5}})
    (tmp_path / "run").mkdir()
    run(spec).save(tmp_path / "run")
    with pytest.raises(SpecError, match="policy fcfs does not seal its batches"):
        read_batches(tmp_path / "run")
    with pytest.raises(SchedlabError, match="no such file"):
        read_batches(tmp_path / "nowhere")


def test_magnus_with_a_model_of_another_kind_is_refused(data, tmp_path):
    from tests.trained_models import chars_plus_one

    model = chars_plus_one(tmp_path / "model")
    with pytest.raises(SpecError, match="wanted is knn"):
        make_spec(
            {
                "policy": {"name": "magnus", "predictor": "oracle", "serving_time": str(model)},
                "workload": {"trace": "fixed", "num_requests": 5, "request_rate": 5},
            }
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "baseline"), [("gpteacher_gpt4_10k", 0.648), ("zeroeval_llama31_8b", 0.504)]
)
def test_application_mean_of_public_prompts_is_as_published(name, baseline):
    read = read_dataset(data_folder() / "length_prediction" / f"{name}.jsonl.gz")
    true = read.output_tokens.astype(np.float64)
    train, test = read.train_rows, read.test_rows
    means = application_means(true[train], read.applications(train), read.applications(test))
    assert kendall_tau(means, true[test]) == pytest.approx(baseline, abs=0.0005)


@pytest.mark.slow
def test_listmle_beats_tau_0_4_from_1000_public_prompts(tmp_path):
    pytest.importorskip("torch")
    source = data_folder() / "length_prediction" / "gpteacher_gpt4_10k.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(source.read_bytes()).splitlines()]
    learned = [row for row in lines if row["split"] == "train"][::8][:1000]
    tested = [row for row in lines if row["split"] == "test"][::4]
    report = trained(write(tmp_path / "part.jsonl", learned + tested), tmp_path / "m", "listmle")
    assert report["test"]["interval"][0] > 0.4


@pytest.mark.slow
def test_train_with_a_hugging_face_encoder_learns_and_checks_its_weights(data, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    words = sorted({w for row in answered() for w in row["prompt"].lower().strip(".").split()})
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]))
    transformers.BertTokenizerFast(str(encoder / "vocab.txt")).save_pretrained(encoder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(words) + 4, intermediate_size=32, **shape)
    transformers.BertModel(config).save_pretrained(encoder)
    done = schedlab("train", data, "-o", tmp_path / "m", "--encoder", f"hf:{encoder}", "--json")
    assert done.exit_code == 0, done.output
    # Random weights still tell words apart.
    assert json.loads(done.stdout)["test"]["kendall_tau"] > 0.4
    torch.manual_seed(1)
    transformers.BertModel(config).save_pretrained(encoder)
    done = schedlab("evaluate", tmp_path / "m", data)
    assert "has other weights than in training" in done.output


def test_draw_of_every_prompt_once_has_the_figures_of_all_prompts():
    """Prompts predicted alike count half a pair, also in the intervals."""
    true = np.array([3.0, 5.0, 5.0, 8.0, 13.0, 21.0])
    predicted = np.array([4.0, 4.0, 9.0, 9.0, 9.0, 21.0])
    once = SimpleNamespace(multinomial=lambda n, shares, size: np.ones((size, n), dtype=int))
    ((drawn_tau, drawn_right), *_) = _resampled([predicted], true, once)[0]
    tau = kendall_tau(predicted, true)
    assert drawn_tau == pytest.approx(tau)
    assert drawn_right == pytest.approx(pairs_right(tau, predicted, true))
    pairs = [(i, j) for i in range(6) for j in range(i) if true[i] != true[j]]
    right = [0.5 + 0.5 * np.sign((predicted[i] - predicted[j]) * (true[i] - true[j]))
             for i, j in pairs]  # fmt: skip
    assert drawn_right == pytest.approx(np.mean(right))


def test_class_of_lengths_stands_for_the_middle_of_its_share(monkeypatch):
    learned = []
    monkeypatch.setattr(network, "_fit", lambda given, *_: learned.append(given) or {})
    monkeypatch.setattr(network, "_loss", lambda *_: None)
    given = network.Examples(
        "none", np.zeros((60, 1), np.float32), [[]] * 60, np.arange(1, 61) ** 2
    )
    trained = network.train_network("buckets", given, num_buckets=4, seed=0)
    expected = np.quantile(learned[0].output_tokens, [1 / 8, 3 / 8, 5 / 8, 7 / 8])
    assert trained.arrays["bucket_tokens"].tolist() == expected.tolist()


def test_prompts_are_split_by_application_and_those_without_a_name_are_one():
    from schedlab.experiments.training import dataset

    columns = SimpleNamespace(application=["b", None, "a", "b", ""])
    assert [rows.tolist() for rows in dataset._by_application(columns)] == [[1, 4], [2], [0, 3]]


def test_nodes_of_trees_are_numbered_on_from_those_of_the_trees_before():
    def tree(left, right, value):
        n = len(left)
        return SimpleNamespace(tree_=SimpleNamespace(
            node_count=n, children_left=np.array(left), children_right=np.array(right),
            feature=np.arange(n) + 5, threshold=np.arange(n) / 2,
            value=np.array(value, dtype=float)[:, None, None],
        ))  # fmt: skip

    fork = [1, -1, -1], [2, -1, -1]
    found = trees.nodes([tree(*fork, [5, 1, 2]), tree([-1], [-1], [7]), tree(*fork, [3, 4, 6])])
    assert {name: column.tolist() for name, column in found.items()} == {
        "roots": [0, 3, 4],
        "feature": [5, -1, -1, -1, 5, -1, -1],
        "threshold": [0.0, 0.5, 1.0, 0.0, 0.0, 0.5, 1.0],
        "left": [1, 0, 0, 0, 5, 0, 0],
        "right": [2, 0, 0, 0, 6, 0, 0],
        "value": [5.0, 1.0, 2.0, 7.0, 3.0, 4.0, 6.0],
    }


@pytest.mark.parametrize("kind", ["random_forest", "listmle"])
def test_trainer_learns_from_the_rows_it_is_given_with_what_was_chosen(monkeypatch, kind):
    asked = []

    class Some:
        def __init__(self, rows):
            self.rows = rows

        def take(self, rows):
            return Some(self.rows[rows])

    monkeypatch.setattr(train, "load_sklearn", lambda: asked.append("sklearn"))
    monkeypatch.setattr(train, "load_torch", lambda: asked.append("torch"))
    monkeypatch.setattr(
        train,
        "examples",
        lambda prompts, true, encoder: asked.append([*prompts.rows, *true, encoder]) or prompts,
    )
    for name in ("train_forest", "train_network"):

        def learn(*given, name=name, **more):
            shown = [one.rows.tolist() if isinstance(one, Some) else one for one in given]
            asked.append((name, *[str(one) for one in shown], more))

        monkeypatch.setattr(train, name, learn)
    chosen = SimpleNamespace(kind=kind, encoder="an encoder", num_buckets=7, seed=5)
    data = SimpleNamespace(
        train_rows=np.array([1, 3, 4]), prompts=Some(np.arange(10, 16)),
        output_tokens=np.arange(20, 26),
    )  # fmt: skip
    train._Trainer(chosen, data).train(np.array([3, 4]))
    if kind == "random_forest":
        assert asked == ["sklearn", ("train_forest", "[13, 14]", "[23 24]", {"seed": 5})]
    else:
        assert asked == [
            "torch", [11, 13, 14, 21, 23, 24, "an encoder"],
            ("train_network", "listmle", "[13, 14]", {"num_buckets": 7, "seed": 5}),
        ]  # fmt: skip


def test_latency_of_a_model_is_that_of_single_prompts_after_a_first_one(monkeypatch):
    asked, times = [], iter([0, 1, 10, 13, 20, 22])
    monkeypatch.setattr(train, "NUM_TIMED", 3)
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    data = SimpleNamespace(
        test_rows=np.array([4, 6, 7, 9]), prompts=SimpleNamespace(take=lambda rows: rows.tolist())
    )
    found = train.latency(SimpleNamespace(lengths=asked.append), data)
    assert asked == [[4], [4], [6], [7]]
    assert found == {"median": 2.0, "p99": pytest.approx(2.98), "num_predictions": 3}


@pytest.mark.slow
def test_network_keeps_the_mean_of_its_newest_steps_each_with_gradients_of_its_own(monkeypatch):
    torch = pytest.importorskip("torch")
    steps = []

    class Counting:
        """Sets every weight to the number of the step."""

        def __init__(self, parameters, lr, weight_decay):
            self.parameters = list(parameters)
            self.is_zeroed = False

        def zero_grad(self):
            self.is_zeroed = True

        def step(self):
            assert self.is_zeroed, "gradients of the step before are still there"
            self.is_zeroed = False
            steps.append(len(steps) + 1)
            with torch.no_grad():
                for weight in self.parameters:
                    assert weight.grad is not None
                    weight.fill_(steps[-1])

    monkeypatch.setattr(torch.optim, "AdamW", Counting)
    monkeypatch.setattr(network, "LEAST_STEPS", 60)
    monkeypatch.setattr(network, "NUM_EPOCHS", 1)
    rng = stream(0, "features")
    plain = rng.standard_normal((40, 3)).astype(np.float32)
    given = network.Examples("none", plain, [[]] * 40, rng.integers(1, 99, 40))
    trained = network.train_network("pointwise", given, num_buckets=4, seed=0)
    assert len(steps) >= 60
    for name in ("hidden", "hidden_bias"):
        kept = trained.arrays[name]
        assert 0.85 * len(steps) < kept.min(), name
        assert kept.max() < len(steps), name


class Prompts:
    """Prompts that are known by their rows."""

    def take(self, rows):
        return tuple(int(row) for row in rows)


def few_answers(**more):
    return SimpleNamespace(
        prompts=Prompts(), output_tokens=np.arange(10) * 10, train_rows=np.array([2, 4, 7, 9]),
        test_rows=np.array([1, 3, 5]), applications=lambda rows: [f"app of {r}" for r in rows],
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [train.FOREST, "buckets"])
def test_trainer_makes_features_once_and_learns_from_the_rows_asked_for(monkeypatch, kind):
    asked, now_s = [], [5.0]

    class Examples:
        def take(self, places):
            return f"examples {places.tolist()}"

    def features(prompts, true, encoder):
        asked.append((prompts, true.tolist(), encoder))
        now_s[0] += 1.5
        return Examples()

    def load(name):
        def loaded():
            asked.append(name)
            now_s[0] += 100.0

        return loaded

    stand_ins = {
        "load_sklearn": load("sklearn"), "load_torch": load("torch"), "examples": features,
        "time": SimpleNamespace(process_time=lambda: now_s[0]),
        "train_forest": lambda prompts, true, seed: ("forest", prompts, true.tolist(), seed),
        "train_network": lambda kind, some, num_buckets, seed: (kind, some, num_buckets, seed),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(train, name, stand_in)
    trainer = train._Trainer(train.Training(kind, "some encoder", 7, 13), few_answers())
    learned = trainer.train(np.array([4, 9]))
    if kind == train.FOREST:
        assert asked == ["sklearn"]
        assert (learned, trainer.features_cpu_s) == (("forest", (4, 9), [40, 90], 13), 0.0)
    else:
        # Places among the rows to learn from; what is imported is no part of the time.
        assert asked == ["torch", ((2, 4, 7, 9), [20, 40, 70, 90], "some encoder")]
        assert (learned, trainer.features_cpu_s) == (("buckets", "examples [1, 3]", 7, 13), 1.5)


def test_model_is_measured_on_rows_beside_the_means_of_those_it_learned_from(monkeypatch):
    def means(true, known, asked):
        return ("means", true.tolist(), known, asked)

    monkeypatch.setattr(train, "application_means", means)
    monkeypatch.setattr(train, "quality", lambda *given: given)
    model = SimpleNamespace(lengths=lambda prompts: f"lengths of {prompts}")
    apps = ["app of 3", "app of 5"]
    for own_data in (True, False):
        predicted, true, asked, told, seed = train.measure(
            model, few_answers(), np.array([3, 5]), seed=11, own_data=own_data
        )
        assert (predicted, true.tolist(), asked, seed) == ("lengths of (3, 5)", [30, 50], apps, 11)
        known = [f"app of {row}" for row in (2, 4, 7, 9)]
        expected = ("means", [20, 40, 70, 90], known, apps) if own_data else None
        assert told == expected


SEALED = {  # a row a request, not in the order in which they were served
    "status": [0, 0, 0, 3, 1, 0, 0, 0],  # one was cut off, one rejected
    "first_scheduled_ns": [45, 50, 0, 5, -1, 40, 46, 60],
    "last_token_ns": [48, 90, 20, 40, -1, 45, 47, 80],
    "prompt_tokens": [8, 7, 5, 9, 999, 2, 8, 3],
    "predicted_tokens": [1, 30, 8, 4, 999, 6, 1, 50],
    "num_preemptions": [1, 0, 0, 0, 0, 0, 0, 0],
}


def sealed_columns(monkeypatch, policy="static", **changed):
    columns = {name: np.array(column) for name, column in {**SEALED, **changed}.items()}
    for name in ("first_scheduled_ns", "last_token_ns"):
        columns[name] = columns[name] * 1_000_000_000
    monkeypatch.setattr(batches, "LEAST_BATCHES", 3)
    monkeypatch.setattr(
        RunResult, "load", lambda folder: SimpleNamespace(policy=policy, requests=columns)
    )


def test_batches_of_a_run_are_whoever_is_served_between_moments_at_which_nobody_is(monkeypatch):
    sealed_columns(monkeypatch)
    found = read_batches("run")
    # At 40 s one ends and the next begins; that of 45 s ran out of memory.
    assert found.shape.tolist() == [[2, 9, 8], [1, 2, 6], [2, 7, 50]]
    assert found.serving_time_s.tolist() == [40, 5, 40]
    assert found.num_left_out == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"policy": "fcfs"}, "run: policy fcfs does not seal its batches"),
        ({"num_preemptions": [1, 1] + [0] * 6}, "run: 2 whole batches, at least 3 needed"),
        ({"predicted_tokens": [np.nan] * 8}, "run: requests carry no prediction"),
        ({"status": [1] * 8}, "run: 0 whole batches, at least 3 needed"),
    ],
)
def test_batches_of_a_run_that_cannot_teach_are_refused(monkeypatch, changed, said):
    sealed_columns(monkeypatch, **changed)
    with pytest.raises(SpecError, match=said):
        read_batches("run")


def test_estimator_of_serving_times_remembers_its_rows_and_is_judged_beside_their_mean(
    monkeypatch, tmp_path
):
    shape = np.exp([[0.0, 0, 0], [2, 4, 8], [4, 0, 8], [1, 1, 1], [9, 9, 9]])
    seen = batches.Batches(shape, np.array([1.0, 2.0, 4.0, 8.0, 10.0]), 6)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "requests.parquet").write_bytes(b"rows")
    asked = []
    monkeypatch.setattr(train, "read_batches", lambda folder: seen)
    monkeypatch.setattr(
        train, "split", lambda *given: asked.append(given) or (np.array([0, 1, 2]), np.array([3]))
    )
    monkeypatch.setattr(train, "write_model", lambda *given: asked.append(given))
    monkeypatch.setattr(batches, "NUM_NEIGHBORS", 1)
    times = iter([10.0, 12.0])
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    report = train.train_estimator(tmp_path / "run", tmp_path / "out", seed=9)
    mean_s = 7 / 3
    # The nearest to (1, 1, 1), by columns over their deviations, is the first: 1 s for 8 s.
    assert report == {
        "kind": "knn", "data": "run", "num_left_out": 6, "num_train": 3,
        "test": pytest.approx({
            "num_batches": 1, "kendall_tau": None, "mean_absolute_error_s": 7.0,
            "median_relative_error": 7 / 8, "mean_absolute_error_of_mean_s": 8 - mean_s,
        }),
        "latency_s": {"median": 2.0},
    }  # fmt: skip
    drawn, (folder, meta, arrays, told) = asked
    assert drawn == (5, 0.2, 9)
    assert (folder, told) == (tmp_path / "out", report)
    assert meta.pop("versions").keys() == {"python", "numpy"}
    assert meta == {
        "kind": "knn", "num_neighbors": 5, "seed": 9,
        "data": {"file": "run", "sha256": hashlib.sha256(b"rows").hexdigest()},
    }  # fmt: skip
    assert arrays["batches"] == pytest.approx(np.array([[0.0, 0, 0], [2, 4, 8], [4, 0, 8]]))
    assert arrays["scale"] == pytest.approx(np.array([[0, 2, 4], [0, 4, 0], [0, 8, 8]]).std(axis=1))
    assert arrays["serving_time_s"].tolist() == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("seed", [0, 1])
def test_batches_to_test_on_are_a_share_of_them_and_none_to_learn_from(seed):
    learned, tested = batches.split(11, 0.2, seed)
    assert sorted([*learned, *tested]) == list(range(11))
    assert (len(tested), list(learned)) == (2, sorted(learned))
    assert len(batches.split(2, 0.2, seed)[1]) == 1
    assert list(tested) != list(batches.split(11, 0.2, seed + 2)[1])


@pytest.mark.parametrize("kind", [train.FOREST, "hashed", "another encoder"])
def test_training_reports_each_point_of_its_curve_and_writes_what_the_last_one_learned(
    monkeypatch, tmp_path, kind
):
    now_s, learned, told, kept = [0.0], [], [], []

    class Trainer:
        features_cpu_s = 0.25

        def __init__(self, training, data):
            self.given = training, data

        def train(self, rows):
            learned.append(rows.tolist())
            now_s[0] += 10.0 * len(rows)
            arrays = {"trained on": len(rows)}
            if kind == train.FOREST:
                return train.Forest(["app"], arrays)
            return TextModel("buckets", kind, arrays)

    def measured(model, data, rows, seed):
        n = model.arrays["trained on"]
        now_s[0] += 1000.0  # is no part of training
        return {"kendall_tau": n / 10, "interval": [n, n + 1], "rows": rows.tolist(), "seed": seed}

    for name, stand_in in {
        "_Trainer": Trainer, "measure": measured, "CURVE_PROMPTS": (2, 3, 4, 50),
        "latency": lambda model, data: {"median": model.arrays["trained on"]},
        "time": SimpleNamespace(process_time=lambda: now_s[0]),
        "write_model": lambda *given: kept.append(given),
        "weights_digest": lambda encoder: f"digest of {encoder}",
    }.items():  # fmt: skip
        monkeypatch.setattr(train, name, stand_in)
    data = few_answers(path=tmp_path / "a.jsonl", split="a split", sha256="digest")
    chosen = train.Training(kind if kind == train.FOREST else "buckets", kind, 7, 13)
    report = train.train(chosen, data, tmp_path, progress=lambda *given: told.append(given))
    assert told == [
        (0, 3, "learning from 2 prompts"), (1, 3, "learning from 3 prompts"),
        (2, 3, "learning from 4 prompts"),
    ]  # fmt: skip
    assert [len(rows) for rows in learned] == [2, 3, 4]
    assert all(rows == sorted(rows) and set(rows) <= {2, 4, 7, 9} for rows in learned)
    assert report == {
        "kind": chosen.kind,
        "encoder": None if kind == train.FOREST else kind,
        "data": "a.jsonl",
        "split": "a split",
        "test": {"kendall_tau": 0.4, "interval": [4, 5], "rows": [1, 3, 5], "seed": 13},
        "learning_curve": [
            {"num_prompts": len(rows), "generated_tokens": 10 * sum(rows),
             "kendall_tau": len(rows) / 10, "interval": [len(rows), len(rows) + 1],
             "training_cpu_s": 10.0 * len(rows)}
            for rows in learned
        ],
        "features_cpu_s": 0.25,
        "training_cpu_s": 40.0,
        "latency_s": {"median": 4},
    }  # fmt: skip
    ((folder, meta, arrays, reported),) = kept
    assert (folder, arrays, reported) == (tmp_path, {"trained on": 4}, report)
    assert meta.pop("versions").keys() == {
        "python", "numpy", *(("scikit-learn", "scipy") if kind == train.FOREST else ("torch",))
    }  # fmt: skip
    assert meta == {
        "kind": chosen.kind,
        "data": {
            "file": "a.jsonl", "sha256": "digest", "split": "a split", "num_train": 4,
            "num_test": 3,
        },
        "seed": 13,
        "test": {"kendall_tau": 0.4, "interval": [4, 5]},
        **{
            train.FOREST: {"applications": ["app"]},
            "hashed": {"encoder": "hashed"},
            "another encoder": {
                "encoder": "another encoder", "encoder_sha256": "digest of another encoder",
            },
        }[kind],
    }  # fmt: skip
    learned.clear()
    alone = train.train(chosen, data, tmp_path, learning_curve=False)
    assert (learned, len(alone["learning_curve"])) == ([[2, 4, 7, 9]], 1)


def model_of(monkeypatch, meta):
    """Let a folder hold a model; return what is asked about it."""
    asked = []
    folder = SimpleNamespace(meta=meta, get=lambda name, kind: kind(meta[name]))
    data = SimpleNamespace(
        sha256="mine", test_rows=np.array([1, 3]),
        prompts=SimpleNamespace(
            text=["a", "b", "c", "d"], application=["x", "y", None, "z"],
            prompt_tokens=np.array([5, 6, 7, 8]), __len__=None,
        ),
        output_tokens=np.array([50, 60, 70, 80]),
    )  # fmt: skip

    class Some(SimpleNamespace):
        def __len__(self):
            return 4

    data.prompts = Some(**{k: v for k, v in vars(data.prompts).items() if k != "__len__"})
    monkeypatch.setattr(evaluate, "ModelFolder", SimpleNamespace(open=lambda *_: folder))
    monkeypatch.setattr(evaluate, "load_length_model", lambda one: "the model")

    def read(path, **given):
        asked.append((path.name, given))
        return data

    def measured(model, dataset, rows, **given):
        assert (model, dataset) == ("the model", data)
        return {"rows": rows.tolist(), **given}

    monkeypatch.setattr(evaluate, "read_dataset", read)
    monkeypatch.setattr(evaluate, "measure", measured)
    monkeypatch.setattr(evaluate, "latency", lambda model, dataset: {"of": model})
    return asked


@pytest.mark.parametrize("own", [True, False])
def test_model_is_tested_on_what_it_did_not_learn_from(monkeypatch, tmp_path, own):
    learned_from = {"sha256": "mine" if own else "other", "file": "theirs.jsonl"}
    asked = model_of(monkeypatch, {"kind": "buckets", "seed": 21, "data": learned_from})
    found = evaluate.evaluate(tmp_path, tmp_path / "some.jsonl", tokenizer="words")
    given = {"seed": 21, "tokenizer": "words", "least": 0}
    assert asked == [("some.jsonl", given)]
    note = (
        "tested on the prompts kept out of training" if own
        else "tested on all of some.jsonl; the model learned from theirs.jsonl"
    )  # fmt: skip
    assert found == {
        "kind": "buckets", "data": "some.jsonl", "latency_s": {"of": "the model"}, "notes": [note],
        "test": {"rows": [1, 3] if own else [0, 1, 2, 3], "seed": 21, "own_data": own},
    }  # fmt: skip
    asked.clear()
    if not own:
        with pytest.raises(SpecError, match=r"learned from theirs\.jsonl, not from this some"):
            evaluate.write_held_out(tmp_path, tmp_path / "some.jsonl", tmp_path / "out.jsonl")
        return
    for name, opened in (("out.jsonl", bytes), ("out.jsonl.gz", gzip.decompress)):
        count = evaluate.write_held_out(
            tmp_path, tmp_path / "some.jsonl", tmp_path / name, tokenizer="words"
        )
        lines = opened((tmp_path / name).read_bytes()).decode().splitlines()
        assert [json.loads(line) for line in lines] == [
            {"application": "y", "prompt": "b", "prompt_tokens": 6, "output_tokens": 60},
            {"application": "z", "prompt": "d", "prompt_tokens": 8, "output_tokens": 80},
        ]
        assert count == 2
    assert asked == [("some.jsonl", given)] * 2


def test_estimator_is_tested_on_all_batches_beside_the_mean_of_them(monkeypatch, tmp_path):
    model_of(monkeypatch, {"kind": "knn"})
    seen = batches.Batches(np.ones((3, 3)), np.array([1.0, 2.0, 6.0]), 0)
    monkeypatch.setattr(evaluate, "read_batches", lambda data: seen)
    monkeypatch.setattr(evaluate, "ServingTime", SimpleNamespace(load=lambda path: path))

    def judged(estimator, given, mean_s, rows):
        return {"by": (estimator, given is seen, mean_s, rows.tolist())}, 0.125

    monkeypatch.setattr(evaluate, "estimator_quality", judged)
    assert evaluate.evaluate(tmp_path / "m", tmp_path / "run") == {
        "kind": "knn", "data": "run", "latency_s": {"median": 0.125},
        "test": {"by": (str(tmp_path / "m"), True, 3.0, [0, 1, 2])},
        "notes": [
            "tested on all batches of the run, also on those it learned from if it is the same"
        ],
    }  # fmt: skip


@pytest.mark.parametrize("encoder", ["hashed", "none"])
def test_network_says_of_made_features_what_the_model_says_of_their_prompts(monkeypatch, encoder):
    """One by one: counts of what a prompt holds behind what its text adds up to."""
    rng = stream(0, "weights")
    texts = ["a few words", "Sum 3 and 4, then stop.", "words, words and more of them?"]
    asked = prompts(np.array(texts, dtype=object), np.array([3, 9, 8]), None)
    monkeypatch.setattr(network, "NUM_NGRAM_BUCKETS", 64)
    if encoder != "hashed":
        some = network.Examples(encoder, text_model.plain_features(asked, None), [], np.ones(3))
    else:
        some = network.examples(asked, np.ones(3), encoder)
    width = some.plain.shape[1] + (5 if encoder == "hashed" else 0)
    arrays = {
        "mean": some.plain.mean(axis=0), "deviation": some.plain.std(axis=0) + 1,
        "rarity": rng.uniform(1, 2, 64), "embedding": rng.standard_normal((64, 5)),
        "hidden": rng.standard_normal((width, 7)), "hidden_bias": rng.standard_normal(7),
        "output": rng.standard_normal((7, 2)), "output_bias": rng.standard_normal(2),
    }  # fmt: skip
    found = network._outputs(arrays, some)
    model = TextModel("buckets", "hashed", arrays)
    if encoder == "hashed":
        assert found == pytest.approx(model.outputs(asked), rel=1e-5)
    scaled = (some.plain - arrays["mean"]) / arrays["deviation"]
    for row, output in zip(scaled, found, strict=True):
        if encoder == "hashed":
            break
        hidden = [max(0.0, float(row @ w) + b) for w, b in
                  zip(arrays["hidden"].T, arrays["hidden_bias"], strict=True)]  # fmt: skip
        assert output == pytest.approx(np.array(hidden) @ arrays["output"] + arrays["output_bias"])


@pytest.mark.parametrize(
    ("num_prompts", "num_kept_out"), [(100, 10), (26, 3), (25, 2), (15, 2), (4, 2)]
)
@pytest.mark.parametrize("kind", ["listmle", "pointwise", "buckets"])
def test_network_learns_from_all_but_a_tenth_which_maps_its_scores_to_lengths(
    monkeypatch, num_prompts, num_kept_out, kind
):
    tokens = np.arange(1, num_prompts + 1) * 10
    plain = np.arange(num_prompts, dtype=np.float32)[:, None]
    given = network.Examples("other", plain, [np.empty(0, np.int64)] * num_prompts, tokens)
    seen = {}

    def fit(learned, scaling, loss, num_outputs, rng):
        seen.update(learned=learned, num_outputs=num_outputs)
        return {"output": np.ones((1, 1), np.float32), "output_bias": np.ones(1, np.float32)}

    def outputs(arrays, some):
        seen["kept out"] = some
        return some.plain * 2

    monkeypatch.setattr(network, "_fit", fit)
    monkeypatch.setattr(network, "_loss", lambda kind, tokens, edges: seen.update(edges=edges))
    monkeypatch.setattr(network, "_outputs", outputs)
    model = network.train_network(kind, given, num_buckets=4, seed=3)
    learned = seen["learned"].output_tokens
    kept_out = sorted(set(tokens.tolist()) - set(learned.tolist()))
    assert (len(learned), len(kept_out)) == (num_prompts - num_kept_out, num_kept_out)
    assert seen["learned"].plain[:, 0].tolist() == (learned / 10 - 1).tolist()
    assert seen["edges"].tolist() == np.quantile(learned, [0.25, 0.5, 0.75]).tolist()
    assert seen["num_outputs"] == (4 if kind == "buckets" else 1)
    arrays = model.arrays
    assert (model.kind, model.encoder) == (kind, "other")
    if kind == "listmle":
        assert seen["kept out"].output_tokens.tolist() != []
        assert sorted(seen["kept out"].output_tokens.tolist()) == kept_out
        ends = arrays["score_quantiles"][[0, -1]].tolist()
        assert ends == [2 * (kept_out[0] / 10 - 1), 2 * (kept_out[-1] / 10 - 1)]
        assert arrays["length_quantiles"][[0, -1]].tolist() == [kept_out[0], kept_out[-1]]
    elif kind == "buckets":
        middles = np.quantile(learned, [0.125, 0.375, 0.625, 0.875])
        assert arrays["bucket_tokens"].tolist() == middles.tolist()
    else:
        logs = np.log(learned)
        assert arrays["output"][0, 0] == pytest.approx(logs.std(), rel=1e-5)
        assert arrays["output_bias"][0] == pytest.approx(logs.std() + logs.mean(), rel=1e-5)
