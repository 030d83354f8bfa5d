"""The list of slips planted by hand still fits the files it is about."""

import pytest

from tests.mutants.judging import slip_mutants
from tests.mutants.slips import ROOT, Slip, every_slip


def test_slips_change_one_line_of_a_file_and_few_are_older_than_it(capsys):
    slips = every_slip()
    assert len(slips) > 200
    assert len({(slip.path, slip.was) for slip in slips}) == len(slips)
    mutants = slip_mutants([""])
    outlived = len(slips) - len(mutants)
    assert outlived <= len(slips) / 10, capsys.readouterr().err
    for mutant in mutants:
        slip, source = mutant.bug, (ROOT / mutant.path).read_text(encoding="utf-8")
        changed = slip.planted(source)
        differing = [
            (a.strip(), b.strip())
            for a, b in zip(source.splitlines(), changed.splitlines(), strict=True)
            if a != b
        ]
        assert differing == [(slip.was, slip.now)]


@pytest.mark.parametrize(("source", "times"), [("a = 1\n", 0), ("b = 1\nif a:\n    b = 1\n", 2)])
def test_slip_whose_line_is_gone_or_is_there_twice_is_refused_by_name(source, times):
    slip = Slip("sim/rng.py", "one too many", "b = 1", "b = 2")
    with pytest.raises(ValueError, match=rf"sim/rng\.py has this line {times} times, not once"):
        slip.planted(source)


def test_slips_written_wrongly_are_refused_with_their_heading():
    with pytest.raises(ValueError, match=r"'-' and '\+': sim/rng\.py: no new line"):
        every_slip("head\n\n@@ sim/rng.py: no new line\n-a = 1\n")
