"""Where a request comes from, in the table of requests."""

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.result import RunResult

ROWS = """\
arrival_s,prompt_tokens,output_tokens,session_id,tenant,application
0.0,10,4,one,a,chat
0.1,10,4,two,b,
0.2,10,4,one,a,code
"""


def test_requests_say_tenant_application_and_session_where_the_trace_does(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(ROWS)
    result = run(make_spec({"workload": {"trace": str(path)}}))
    result.save(tmp_path / "out")
    for requests in (result.requests, RunResult.load(tmp_path / "out").requests):
        assert requests["tenant"].tolist() == ["a", "b", "a"]
        assert requests["session"].tolist() == ["one", "two", "one"]
        assert requests["application"].tolist() == ["chat", "", "code"]


def test_requests_of_a_trace_without_origins_have_no_such_columns():
    result = run(make_spec({"workload": {"trace": "azure-conv", "num_requests": 3}}))
    assert not {"tenant", "application", "session"} & set(result.requests)
