"""The command that checks an experiment and runs nothing."""

from __future__ import annotations

import typer

from schedlab.experiments.commands.experiment import Overrides, SpecFile, load_experiment
from schedlab.experiments.commands.terminal import print_lines, print_table

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def check(spec_file: SpecFile, overrides: Overrides = None) -> None:
    """Check an experiment, every point of its sweep included, and run nothing."""
    from schedlab.experiments.results.saved_results import told_once
    from schedlab.experiments.results.tables import changed_rows
    from schedlab.experiments.running.cautions import cautions, sure_to_be_rejected
    from schedlab.experiments.running.fleet import resolve_fleet
    from schedlab.experiments.running.run import checked_workload
    from schedlab.experiments.specification.sweep import points
    from schedlab.sim.errors import SpecError

    spec = load_experiment(spec_file, overrides)
    settings = [point for point in points(spec) if point.replication == 0]
    rows = []
    read: dict[str, list[str]] = {}
    told: list[tuple[str, str]] = []
    num_served = 0
    for point in settings:
        try:
            one = point.spec
            kinds = resolve_fleet(one)
            longest = [kind.point.config.max_model_len for kind in kinds]
            asked = repr((one.workload, one.measure, one.slo, one.cluster, longest))
            if asked not in read:
                trace = checked_workload(one, min(longest))
                num, why = sure_to_be_rejected(trace, kinds)
                num_served += num < len(trace)
                rejected = [f"{num} of {len(trace)} requests rejected, e.g.: {why}"] if num else []
                read[asked] = rejected + changed_rows(trace.report.lines())
        except SpecError as error:
            raise SpecError(f"{point.label}: {error}" if spec.sweep else str(error)) from None
        told += [(point.label, line) for line in [*read[asked], *cautions(one, kinds)]]
        found = kinds[0].point
        tokens = found.config.num_blocks * found.config.block_size
        rows.append((point.label, f"{tokens:,}", f"{found.config.max_model_len:,}"))
    different = list(dict.fromkeys(row[1:] for row in rows))
    shown = rows if len(different) > 1 else [("every setting", *different[0])]
    print_table("", ("setting", "KV memory\ntokens", "longest request\ntokens"), shown)
    lines = [f"warning: {line}" for line in told_once(told, len(settings))]
    if not num_served:
        print_lines(lines)
        raise SpecError(f"{spec.name}: no request would be answered, in any setting")
    count = f"settings: {len(settings)}, replications of each: {spec.replications}"
    verdict = "runs, with warnings" if lines else "nothing wrong found"
    print_lines([*lines, f"{spec.name}: {verdict}; {count}"])
