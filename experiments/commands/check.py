"""The command that checks an experiment and runs nothing."""

from __future__ import annotations

import typer

from schedlab.experiments.commands.experiment import Overrides, SpecFile, load_experiment
from schedlab.experiments.commands.terminal import print_lines, print_table

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def check(spec_file: SpecFile, overrides: Overrides = None) -> None:
    """Check an experiment, every point of its sweep included, and run nothing."""
    from schedlab.experiments.running.resolved import resolve
    from schedlab.experiments.running.run import checked_workload
    from schedlab.experiments.specification.sweep import points
    from schedlab.sim.errors import SpecError

    spec = load_experiment(spec_file, overrides)
    settings = [point for point in points(spec) if point.replication == 0]
    rows = []
    read: set[str] = set()
    for point in settings:
        try:
            found = resolve(point.spec)
            one = point.spec
            asked = repr((one.workload, one.measure, one.slo, one.cluster))
            if asked not in read:
                checked_workload(one, found.config.max_model_len)
                read.add(asked)
        except SpecError as error:
            raise SpecError(f"{point.label}: {error}" if spec.sweep else str(error)) from None
        tokens = found.config.num_blocks * found.config.block_size
        rows.append((point.label, f"{tokens:,}", f"{found.config.max_model_len:,}"))
    different = list(dict.fromkeys(row[1:] for row in rows))
    shown = rows if len(different) > 1 else [("every setting", *different[0])]
    print_table("", ("setting", "KV memory\ntokens", "longest request\ntokens"), shown)
    count = f"settings: {len(settings)}, replications of each: {spec.replications}"
    print_lines([f"{spec.name}: nothing wrong found; {count}"])
