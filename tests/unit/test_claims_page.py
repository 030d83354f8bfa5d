"""The list of quoted claims, and the page that is made from it."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from schedlab.experiments.claims import page
from schedlab.experiments.claims.claims import Finding, MeasuredFigure, shipped
from schedlab.experiments.claims.page import data, markdown
from schedlab.experiments.claims.quoted import (
    PARTS,
    QuotedClaim,
    load_quoted,
    measured_of,
    verdict_of,
    wanted,
)
from schedlab.experiments.claims.readings import Reading
from schedlab.experiments.claims.report import anchor, section
from schedlab.experiments.commands.app import app
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.models import model
from tests.unit.test_claims import experiment

CLAIMS = load_quoted()


def claim(**changes):
    fields = {"id": "A1", "quoted": "It is faster.", "source": "None.", **changes}
    return QuotedClaim(**fields)


def finding(*verdicts, folder="claims"):
    """An experiment with two figures, as if they had come out like this."""
    spec = make_spec({**experiment(), "name": "small"})
    measured = tuple(
        MeasuredFigure(figure, 2.0, 1.5, 2.5, (), (), verdict)
        for figure, verdict in zip(spec.claim.figures, verdicts, strict=True)
    )
    return Finding(Path("experiments") / "papers" / folder / "small.yaml", spec, measured, ())


# -- the list ----------------------------------------------------------------------------------


def test_list_has_all_claims_of_all_parts():
    parts = Counter(c.id[0] for c in CLAIMS)
    assert parts == {"A": 22, "B": 14, "C": 11, "D": 8, "E": 7, "F": 11}
    assert list(parts) == list(PARTS)
    numbers = [int(c.id[1:]) for c in CLAIMS]
    assert numbers == [n for part in parts for n in range(1, parts[part] + 1)]


@pytest.mark.slow
def test_figures_that_the_list_names_exist():
    figures = {}
    for path in (*shipped("claims"), *shipped("policies")):
        spec = load_spec(path)
        assert spec.name not in figures, "two experiments have the same name"
        figures[spec.name] = {figure.name for figure in spec.claim.figures}
    named = wanted(CLAIMS)
    for name in named:
        assert named[name] <= figures[name], name
    # What was made for this page is used on it.
    assert {path.stem for path in shipped("claims")} <= set(named)


@pytest.mark.parametrize(
    "fields",
    [{}, {"test": {"x": ["y"]}, "outside": "no"}, {"outside": "no", "checked": "yes"}],
    ids=str,
)
def test_claim_is_decided_in_exactly_one_way(fields):
    with pytest.raises(ValueError, match="exactly one of test, outside and checked"):
        claim(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {id: G1, quoted: a, source: b, outside: c}", "0.id"),
        ("- {id: A1, quoted: a, source: b, outside: c, tset: 1}", "tset"),
        ("- {id: A1, quoted: a, source: b, outside: c}\n" * 2, "A1 is given twice"),
    ],
    ids=str,
)
def test_wrong_list_is_refused_with_the_entry_at_fault(tmp_path, text, message):
    path = tmp_path / "list.yml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_quoted(path)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"smal": ["throughput"]}, "no experiment 'smal'; did you mean small"),
        ({"small": ["troughput"]}, "no figure 'troughput'; did you mean throughput"),
    ],
    ids=str,
)
def test_unknown_figure_names_the_nearest(test, message):
    found = {"small": finding("reproduced", "opposite")}
    with pytest.raises(SpecError, match=message):
        measured_of(claim(test=test), found)


def test_block_of_sixteen_tokens_is_eight_mebibytes():
    # "Blocks are typically of 16 KB" (claim C3): 512 times as much, over all layers.
    assert 16 * model("llama-2-7b").kv_bytes_per_token("fp16") == 8 * 2**20 == 512 * 16 * 2**10


# -- verdicts and page -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (("reproduced", "reproduced"), "holds"),
        (("reproduced", "opposite"), "holds in part"),
        (("direction only", "direction only"), "holds in part"),
        (("not reproduced", "opposite"), "does not hold"),
        (("not measured", "not reproduced"), "does not hold"),
    ],
)
def test_verdict_on_a_claim_follows_from_its_figures(verdicts, expected):
    asked = claim(test={"small": ["throughput", "capacity"]})
    measured = measured_of(asked, {"small": finding(*verdicts)})
    assert verdict_of(asked, measured) == expected


def test_claim_of_which_only_a_part_is_tested_holds_in_part():
    asked = claim(test={"small": ["throughput"]}, only="a half of it.")
    found = {"small": finding("reproduced", "opposite")}
    assert verdict_of(asked, measured_of(asked, found)) == "holds in part"
    assert "Tested is only a part: a half of it." in markdown([asked], [found["small"]])


def test_figures_beside_do_not_decide():
    asked = claim(test={"small": ["throughput"]}, beside={"small": ["capacity"]})
    measured = measured_of(asked, {"small": finding("reproduced", "opposite")})
    assert verdict_of(asked, measured) == "holds"


def test_page_tells_claim_source_figures_and_reasons():
    claims = [
        claim(test={"small": ["throughput"]}, beside={"small": ["capacity"]}),
        claim(id="D1", outside="It is a default."),
        claim(id="F1", checked="A measurement."),
    ]
    found = [finding("reproduced", "opposite")]
    told = markdown(claims, found)
    assert "Of 3 claims: 1 holds, 1 checked otherwise, 1 not testable here." in told
    assert "| [A1](#a1) | It is faster. | None. | holds |" in told
    assert "| [small](#continuous) | throughput | 2.00x to 4.00x |" in told
    assert "*beside:* capacity" in told
    assert "**Not testable here.** It is a default." in told
    assert "`experiments/papers/claims/small.yaml`" in told
    assert told == markdown(claims, found)


def test_section_ends_with_what_a_bound_is_if_any_figure_is_one():
    found = finding("reproduced", "opposite")
    first, second = found.measured
    bound = replace(second, of=(Reading(8.0, is_bound=True),))
    some = replace(found, measured=(first, bound))
    (told,) = [line for line in section(some) if line.startswith("A bound: ")]
    assert told not in list(section(found))


def test_section_of_an_experiment_begins_and_ends_alike_with_and_without_figures():
    found = finding("reproduced", "opposite")
    claim_made = found.spec.claim.model_copy(update={"comment": "What else there is to say."})
    spec = found.spec.model_copy(update={"claim": claim_made})
    begin = [
        f"## {claim_made.system}",
        "",
        f"{claim_made.statement} ({claim_made.source})",
        "",
        f"* Experiment: `experiments/papers/claims/small.yaml`, {spec.model} on {spec.hardware}, "
        f"{spec.replications} seeds.",
        f"* Differs from the source: {claim_made.scaled_down}",
    ]
    end = ["", "What else there is to say."]
    assert list(section(replace(found, spec=spec, measured=()))) == [*begin, *end]
    lines = list(section(replace(found, spec=spec)))
    assert lines[: len(begin)] == begin
    assert [line[:16] for line in lines[len(begin) : -2]] == [
        "* **throughput**",
        "* **capacity**: ",
    ]
    assert lines[-2:] == end
    silent = spec.model_copy(update={"claim": claim_made.model_copy(update={"comment": None})})
    assert list(section(replace(found, spec=silent, measured=()))) == begin


def test_data_keeps_figures_of_this_page_apart_from_cited_ones(tmp_path):
    text = (tmp_path / "small.yaml", "name: small")
    text[0].write_text(text[1])
    cited = finding("reproduced", "opposite", folder="policies")
    cited = Finding(tmp_path.parent / "policies" / "small.yaml", cited.spec, cited.measured[:1], ())
    cited.path.parent.mkdir(exist_ok=True)
    cited.path.write_text("name: small")
    found = data([claim(test={"small": ["throughput"]})], [cited])
    assert found["experiments"] == []
    (entry,) = found["cited"]
    assert [figure["name"] for figure in entry["figures"]] == ["throughput"]
    assert [figure["name"] for figure in entry["claim"]["figures"]] == ["throughput"]
    assert found["claims"][0]["verdict"] == "holds"
    assert math.isclose(entry["figures"][0]["estimate"], 2.0)


def test_recorded_page_has_the_present_list():
    root = Path(__file__).resolve().parents[2]
    record = json.loads((root / "docs" / "results" / "claims.json").read_text())
    # A page older than the list fails here: schedlab claims --page claims -o docs/results
    recorded = [{k: v for k, v in c.items() if k != "verdict"} for c in record["claims"]]
    assert recorded == [c.model_dump(exclude_none=True, exclude_defaults=True) for c in CLAIMS]


def test_files_and_the_page_of_quoted_claims_exclude_each_other():
    path = str(shipped("policies")[0])
    done = CliRunner().invoke(app, ["claims", path, "--page", "claims"])
    assert done.exit_code != 0


def test_data_of_both_kinds_of_experiments_has_each_once_and_all_about_it(monkeypatch):
    monkeypatch.setattr(Finding, "source_sha256", property(lambda self: str(self.path)))
    mine = finding("reproduced", "opposite")
    other = finding("not reproduced", "direction only", folder="policies")
    found = data([claim(test={"small": ["throughput", "capacity"]})], [other, mine])
    assert list(found) == ["versions", "claims", "experiments", "cited"]
    told = [[entry["source_sha256"] for entry in found[key]] for key in ("experiments", "cited")]
    assert told == [
        ["experiments/papers/claims/small.yaml"],
        ["experiments/papers/policies/small.yaml"],
    ]
    (entry,) = found["cited"]
    assert [figure["verdict"] for figure in entry["figures"]] == [
        "not reproduced",
        "direction only",
    ]
    assert {key: entry[key] for key in ("file", "seeds", "cost_models")} == {
        "file": "small.yaml",
        "seeds": [other.spec.seed + r for r in range(other.spec.replications)],
        "cost_models": [],
    }
    assert [
        [figure[key] for key in ("estimate", "interval", "of", "against", "num_bounds")]
        for figure in entry["figures"]
    ] == [[2.0, [1.5, 2.5], [], [], 0]] * 2
    assert found["claims"] == [
        {
            "id": "A1",
            "quoted": "It is faster.",
            "source": "None.",
            "test": {"small": ["throughput", "capacity"]},
            "verdict": "holds in part",
        }
    ]


def test_page_runs_its_own_experiments_in_full_and_of_others_the_figures_it_cites(monkeypatch):
    specs = {name: SimpleNamespace(name=name) for name in ("own", "cited", "both", "unused")}
    lists = {
        "claims": [(Path("claims/own.yaml"), specs["own"]), (Path("claims/b.yaml"), specs["both"])],
        "policies": [
            (Path("policies/unused.yaml"), specs["unused"]),
            (Path("policies/b.yaml"), specs["both"]),
            (Path("policies/cited.yaml"), specs["cited"]),
        ],
    }
    claims = [
        claim(test={"cited": ["f"], "own": ["g"]}),
        claim(id="B1", test={"both": ["h"]}, beside={"cited": ["i"]}),
    ]
    monkeypatch.setattr(page, "load_quoted", lambda: claims)
    monkeypatch.setattr(page, "shipped", lambda folder: folder)
    monkeypatch.setattr(page, "load_claims", lambda folder: lists[folder])
    monkeypatch.setattr(
        page,
        "examine",
        lambda path, spec, runs, only=None: SimpleNamespace(told=(path, runs, only), spec=spec),
    )
    told, findings = page.run_page("runs")
    assert told is claims
    assert [finding.told for finding in findings] == [
        (Path("claims/own.yaml"), "runs", None),
        (Path("claims/b.yaml"), "runs", None),
        (Path("policies/cited.yaml"), "runs", {"f", "i"}),
    ]


def test_page_is_written_with_its_data_into_a_folder_that_is_made(tmp_path, monkeypatch):
    told = {"a": 1.23456789, "b": [None]}
    monkeypatch.setattr(page, "markdown", lambda *given: f"page of {given}")
    monkeypatch.setattr(page, "data", lambda *given: told | {"of": list(given)})
    files = page.write(["claims"], ["findings"], tmp_path / "new" / "er")
    assert files == [tmp_path / "new" / "er" / name for name in ("claims.md", "claims.json")]
    assert files[0].read_text() == "page of (['claims'], ['findings'])"
    text = files[1].read_text()
    assert text.endswith("}\n")
    assert json.loads(text) == {"a": 1.234568, "b": [None], "of": [["claims"], ["findings"]]}


def test_claim_on_the_page_has_every_part_in_its_turn(monkeypatch):
    found = {
        "small": finding("reproduced", "opposite"),
        "cited": finding("in our band", "opposite", folder="policies"),
    }
    asked = claim(
        test={"small": ["throughput"], "cited": ["capacity"]},
        beside={"small": ["capacity"]},
        only="a half of it.",
        reading="We read it so.",
    )
    system = found["small"].spec.claim.system
    lines = list(page._claim(asked, "does not hold", found))
    assert lines[:12] == [
        "### A1", "", "> It is faster.", "", "*Source:* None.", "", "**Does not hold.**", "",
        "Tested is only a part: a half of it.", "", "We read it so.", "",
    ]  # fmt: skip
    rows = [line for line in lines[12:] if line.startswith("| [")]
    begins = [row.split("|")[1:3] for row in rows]
    assert begins == [
        [f" [small](#{anchor(system)}) ", " throughput "],
        [f" [cited](policies.md#{anchor(system)}) ", " capacity "],
        [f" [small](#{anchor(system)}) ", " *beside:* capacity "],
    ]
    assert lines[12].startswith("| experiment | figure | claimed |")
    assert not any("Why not" in line for line in lines)
    cause = SimpleNamespace(sentence="It is slower.")
    monkeypatch.setattr(
        page,
        "measured_of",
        lambda *_: [
            (SimpleNamespace(figure=SimpleNamespace(name=name), cause=cause), False)
            for name in ("f", "g")
        ],
    )
    monkeypatch.setattr(page, "_figure_rows", lambda *_: [])
    assert list(page._claim(asked, "holds", found))[-5:] == [
        "", "Why not (what shows it stands with the experiment):", "",
        "* f: It is slower.", "* g: It is slower.",
    ]  # fmt: skip
    plain = claim(outside="It is a default.")
    assert list(page._claim(plain, "not testable here", found))[6:7] == [
        "**Not testable here.** It is a default."
    ]
