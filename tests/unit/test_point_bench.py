"""What a point costs beside its run."""

from types import SimpleNamespace

from schedlab.experiments.bench import point_bench


def test_point_costs_beside_its_run_are_medians_of_rounds_but_the_first(monkeypatch):
    spent_ms = iter([100.0, 900.0, 4.0, 10.0, 8.0, 10.0, 2.0, 20.0])
    ran, kept = [], []

    def cpu_ms(work):
        work()
        return next(spent_ms)

    monkeypatch.setattr(point_bench, "_cpu_ms", cpu_ms)
    monkeypatch.setattr(point_bench, "_spec", lambda seed: seed)
    monkeypatch.setattr(point_bench, "run", ran.append)
    monkeypatch.setattr(
        point_bench, "Runs", lambda store, _: SimpleNamespace(points=lambda p: kept.append(p))
    )
    # Of two points each: 2, 4 and 1 ms alone; 5 - 2, 5 - 4 and 10 - 1 ms beside them.
    assert point_bench.measure(2, 3, True) == (2.0, 3.0)
    assert ran == list(range(8)), "each point has a seed of its own"
    assert [spec for points in kept for spec, _ in points] == ran
