"""The least of many loads, known all the time, against looking at all of them."""

from hypothesis import given
from hypothesis import strategies as st

from schedlab.sim.drive.engine_state import first_least
from schedlab.sim.drive.tournament import Tournament

_LOADS = st.sampled_from((0.0, 0.5, 1.0, 2.0, 3.0))


@given(st.data(), st.lists(_LOADS, min_size=1, max_size=21))
def test_tournament_of_changing_loads_finds_the_first_least_from_any_start(data, loads):
    tournament = Tournament(loads)
    places = st.integers(0, len(loads) - 1)
    for place, load in data.draw(st.lists(st.tuples(places, _LOADS), max_size=12)):
        tournament.change(place, load)
        loads[place] = load
        for start in range(len(loads)):
            assert tournament.first_least(start) == first_least(loads, start)


def test_tournament_of_one_load_finds_it_whatever_it_is():
    tournament = Tournament([5.0])
    tournament.change(0, 7.0)
    assert tournament.first_least(0) == 0
