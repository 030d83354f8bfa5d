"""What is said against an experiment before it runs, by `check` and by `run` alike."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.results.tables import warnings
from schedlab.experiments.running.cautions import cautions, sure_to_be_rejected
from schedlab.experiments.running.fleet import resolve_fleet
from schedlab.experiments.running.run import checked_workload, run
from schedlab.experiments.specification.loading import make_spec

LOAD = {"num_requests": 3, "request_rate": 10, "prompt_tokens": 20, "output_tokens": 2}
PARTS = {"p": {"role": "prefill", "count": 3}, "d": {"role": "decode", "count": 2}}


def told(**changes):
    spec = make_spec({"model": "llama-3-8b", "workload": LOAD, **changes})
    return cautions(spec, resolve_fleet(spec)), spec


def drawing(d):
    return {"name": "power_of_d", "d": d}


def checked(tmp_path, **changes):
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({"workload": LOAD, **changes}))
    return CliRunner().invoke(app, ["check", str(file)])


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"count": 4, "router": drawing(4)}, []),
        ({"count": 4, "router": drawing(5)},
         ["router power_of_d draws d=5 of 4 engines: it looks at all of them"]),
        ({"pools": PARTS, "router": drawing(3), "decode_router": drawing(2)}, []),
        ({"pools": PARTS, "router": drawing(4), "decode_router": drawing(3)},
         ["router power_of_d draws d=4 of 3 engines: it looks at all of them",
          "decode_router power_of_d draws d=3 of 2 engines: it looks at all of them"]),
        ({"count": 1, "router": drawing(2),
          "autoscaler": {"name": "hpa", "max": 4, "target": 5}}, []),
        ({"pools": {"a": {"count": 1, "autoscaler": {
            "name": "hpa", "max": 4, "target": 5}}}, "router": drawing(2)},
         []),
    ],
)  # fmt: skip
def test_router_that_draws_more_engines_than_there_are_is_told(cluster, said):
    assert told(cluster=cluster)[0] == said


def test_length_beyond_the_models_is_told_once():
    said, spec = told(cluster=2, engine={"max_model_len": 8193})
    assert said == [
        "max_model_len is 8,193, and llama-3-8b is made for 8,192 tokens: engines refuse that, or "
        "answers are of no use"
    ]
    assert said[0] in warnings(run(spec))
    assert told(engine={"max_model_len": 8192})[0] == []


def test_requests_that_check_foresees_as_rejected_are_those_that_a_run_rejects(tmp_path):
    rows = [(0, 20, 2, 0), (1, 20, 13, 0), (2, 20, 50, 12), (3, 20, 50, 13), (4, 40, 1, 0)]
    lines = ["arrival_s,prompt_tokens,output_tokens,max_tokens", *(
        ",".join(map(str, row)) for row in rows)]  # fmt: skip
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    spec = make_spec({
        "workload": {"trace": str(tmp_path / "t.csv")}, "engine": {"num_gpu_blocks_override": 2},
    })  # fmt: skip
    kinds = resolve_fleet(spec)
    trace = checked_workload(spec, 32)
    num, why = sure_to_be_rejected(trace, kinds)
    result = run(spec)
    assert num == result.metrics()["rejected"] == 2
    assert why == next(iter(result.reject_reasons.values()))


def test_check_says_what_a_run_warns_of(tmp_path):
    done = checked(tmp_path, cluster={"count": 2, "router": "prefix_aware"})
    assert done.exit_code == 0
    assert "warning: router prefix_aware goes by cached prefixes" in done.output
    assert "x: runs, with warnings" in done.output
    assert "x: nothing wrong found" in checked(tmp_path).output


def test_check_of_an_experiment_that_rejects_everything_fails(tmp_path):
    engine = {"num_gpu_blocks_override": 1}
    done = checked(tmp_path, engine=engine)
    assert done.exit_code != 0
    assert "warning: 3 of 3 requests rejected, e.g.: prompt and output take" in done.output
    assert "no request would be answered, in any setting" in done.stderr
    done = checked(tmp_path, sweep={"engine.num_gpu_blocks_override": [1, 100]})
    assert done.exit_code == 0
    assert "warning: num_gpu_blocks_override=1: 3 of 3 requests rejected" in done.output


def test_cautions_are_kept_with_the_result(tmp_path):
    run(told(cluster={"count": 1, "router": drawing(2)})[1]).save(tmp_path)
    provenance = json.loads((tmp_path / "result.json").read_text())["schedlab"]["provenance"]
    assert len(provenance["cautions"]) == 1
    assert "cautions" not in run(told()[1]).provenance
