"""What a page says of settings beside the first one: where, and of how many runs."""

from types import SimpleNamespace

import pytest

from schedlab.experiments.report import page as page_module


def judged_at(*loads, num_runs):
    """Return results whose runs have known metrics, and what `all_loads` says of them."""
    rows = {name: SimpleNamespace(label=name) for load in loads for name in load[1]}
    values = {
        "request_throughput": 10.0, "request_goodput": None, "mean_e2el_ms": 100.0,
        "p99_ttft_ms": 50.0, "p99_tpot_ms": 5.0,
    }  # fmt: skip

    def run(name, i):
        scale = {"a": 1.0, "b": 1.5}[name[0]] * (1 + i / 1000)
        metrics = {key: value and value * scale for key, value in values.items()}
        return SimpleNamespace(head=lambda: {"metrics": metrics})

    results = SimpleNamespace(
        rows=list(rows.values()),
        of=lambda row: [run(row.label, i) for i in range(num_runs.get(row.label, 5))],
    )
    return results, [([rows[name] for name in names], load) for load, names in loads]


@pytest.mark.parametrize(
    ("loads", "num_runs", "has_verdicts"),
    [
        ([("", ("a", "b"))], {}, True),
        ([("", ("a",))], {}, False),
        ([("", ("a", "b"))], {"a": 1, "b": 1}, False),
        ([("", ("a", "b"))], {"b": 1}, False),
        ([("at 2 req/s", ("a", "b")), ("at 4 req/s", ("a4", "b4"))], {}, True),
        ([("at 2 req/s", ("a",)), ("at 4 req/s", ("a4", "b4"))], {}, True),
        ([("at 2 req/s", ("a",)), ("at 4 req/s", ("a4",))], {}, False),
    ],
)
def test_page_compares_settings_with_the_first_at_each_load_if_all_were_run_again(
    monkeypatch, loads, num_runs, has_verdicts
):
    results, told = judged_at(*loads, num_runs=num_runs)
    monkeypatch.setattr(page_module, "all_loads", lambda rows: told)
    monkeypatch.setattr(page_module, "_short", lambda row: f"<{row.label}>")
    found = page_module._verdicts(results)
    if not has_verdicts:
        assert found is None
        return
    table = found["table"]
    pairs = [(load, names[0], name) for load, names in loads for name in names[1:]]
    several = len(loads) > 1
    assert list(table.header) == [*["req/s"] * several, "verdict", "effect size", "pairs"]
    assert table.num_text == 1 + several
    rows = [list(row) for row in table.lines]
    assert len(rows) == 4 * len(pairs)  # nobody had a target for goodput
    for row, (load, base, other) in zip(rows[::4], pairs, strict=True):
        if several:
            assert row.pop(0) == load.split()[1]
        sentence, _, count = row
        assert sentence.startswith(f"<{other}>")
        assert f"<{base}>" in sentence
        assert "50" in sentence
        assert count == "5"
    intro = found["intro"]
    first = "at each rate" if several else ""
    assert intro.startswith(f"Each setting against <a>, the first{', ' + first if first else ''}:")
    assert f"corrected for the {len(rows)} comparisons" in intro


@pytest.mark.parametrize(("num_first", "num_other"), [(5, 4), (4, 5), (4, 4)])
def test_page_compares_no_settings_of_which_one_has_more_runs(monkeypatch, num_first, num_other):
    results, told = judged_at(("", ("a", "b")), num_runs={"a": num_first, "b": num_other})
    monkeypatch.setattr(page_module, "all_loads", lambda rows: told)
    monkeypatch.setattr(page_module, "_short", lambda row: f"<{row.label}>")
    found = page_module._verdicts(results)
    assert len(found["table"].lines) == (4 if num_first == num_other else 0)
