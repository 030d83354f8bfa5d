"""Modules that users write beside their experiments: edited, of one name twice, in workers."""

import importlib
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

import schedlab as sl
from schedlab.experiments.running.point_hash import own_modules
from schedlab.experiments.specification.own_modules import find_own_modules, taken_from_elsewhere
from schedlab.experiments.sweeps import jobs
from schedlab.experiments.sweeps.store import Store
from schedlab.policies import ContinuousBatching
from schedlab.sim import user_modules
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.user_modules import Places, import_own, look_in, sources

EXPERIMENT = {
    "name": "x", "workload": {"trace": "azure-conv", "num_requests": 30, "request_rate": 30},
    "engine": {"max_num_seqs": 2, "trial_requests": 0}, "policy": "polu:P",
}  # fmt: skip
SWEPT = {**EXPERIMENT, "replications": 2, "sweep": {"policy": ["fcfs", "polu:P"]}}
POLICY = """\
from schedlab.policies import ContinuousBatching
from helpu import SIGN

class P(ContinuousBatching):
    def key(self, state, now_ns):
        return {}SIGN * state.request.prompt_tokens
"""


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch, tmp_path):
    """Work in an empty folder, and leave no module of it behind."""
    before = user_modules.places()
    monkeypatch.chdir(tmp_path)
    find_own_modules(tmp_path)
    yield
    user_modules._places = before
    for name in ("polu", "helpu", "packu", "packu.inner", "lazyu"):
        sys.modules.pop(name, None)
        user_modules._asked.discard(name)
        user_modules._held.pop(name, None)


def write(folder, sign="+", helper="SIGN = 1\n"):
    folder.mkdir(exist_ok=True)
    (folder / "spec.yaml").write_text(json.dumps(EXPERIMENT))
    (folder / "polu.py").write_text(POLICY.format(sign))
    (folder / "helpu.py").write_text(helper)
    return folder / "spec.yaml"


def ttft(results):
    return results.rows[0].mean("mean_ttft_ms")


@pytest.fixture
def both(tmp_path):
    """Return what the policy gives either way round."""
    up, down = (ttft(sl.run(write(tmp_path / name, name[-1]))) for name in ("of+", "of-"))
    assert up != down
    return up, down


@pytest.mark.slow
@pytest.mark.parametrize("edits", ["policy", "helper"])
def test_edited_module_runs_as_it_is_now_and_is_kept_under_its_own_hash(tmp_path, both, edits):
    up, down = both
    spec = write(tmp_path / "a")
    assert ttft(sl.run(spec)) == up
    write(tmp_path / "a", *(["-"] if edits == "policy" else ["+", "SIGN = -1\n"]))
    assert ttft(sl.run(spec)) == down
    assert ttft(sl.sweep(spec, folder="kept")) == down
    write(tmp_path / "a")
    assert ttft(sl.sweep(spec, folder="kept")) == up


@pytest.mark.slow
def test_modules_of_one_name_beside_two_experiments_are_each_their_own(tmp_path, both):
    a, b = sl.spec(write(tmp_path / "a")), sl.spec(write(tmp_path / "b", "-"))
    assert [ttft(sl.run(one)) for one in (a, b, a)] == [both[0], both[1], both[0]]


@pytest.mark.slow
def test_claims_of_two_folders_use_the_modules_of_each_whoever_runs_them(tmp_path):
    figure = {
        "name": "g", "metric": "mean_ttft_ms", "compare": "value", "accept": [0, 1],
        "of": {"policy": "polu:P"},
    }  # fmt: skip
    claim = {"system": "S", "statement": "S.", "source": "me", "scaled_down": "no"}
    files = []
    for name, sign in (("a", "+"), ("b", "-")):
        file = write(tmp_path / name, sign).with_name("claim.yaml")
        file.write_text(json.dumps({**SWEPT, "claim": {**claim, "figures": [figure]}}))
        files.append(file)
    expected = [sl.run(file).rows[1].mean("mean_ttft_ms") for file in files]
    assert expected[0] != expected[1]
    for num_processes in (1, 2):
        found = sl.claims(*files, jobs=num_processes).data
        measured = [one["figures"][0]["estimate"] for one in found["experiments"]]
        assert measured == expected


def test_module_beside_the_experiment_goes_before_the_users_others_and_not_before_installed(
    tmp_path, monkeypatch
):
    write(tmp_path / "elsewhere", "-")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    assert import_own("polu").__file__ == str(tmp_path / "elsewhere" / "polu.py")
    for name in ("polu", "json", "numpy", "schedlab"):
        write(tmp_path / "a").with_name(f"{name}.py").write_text("N = 1\n")
    find_own_modules(tmp_path / "a")
    assert import_own("polu").__file__ == str(tmp_path / "a" / "polu.py")
    for name in ("json", "numpy", "schedlab"):
        assert not hasattr(import_own(name), "N")


@pytest.mark.slow
def test_class_of_a_module_that_was_edited_since_is_refused(tmp_path, monkeypatch, both):
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    spec = write(tmp_path / "a")
    find_own_modules(tmp_path / "a")
    held = importlib.import_module("polu").P
    assert ttft(sl.run(spec, policy=held)) == both[0]
    write(tmp_path / "a", "-")
    with pytest.raises(SpecError, match=r"^P: was imported before its module was changed"):
        sl.run(spec, policy=held)
    assert ttft(sl.run(spec, policy=importlib.import_module("polu").P)) == both[1]


def test_class_edited_before_anything_was_asked_of_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    spec = write(tmp_path / "a")
    held = importlib.import_module("polu").P
    write(tmp_path / "a", "-")
    with pytest.raises(SpecError, match="import it again, or name it 'polu:P'"):
        sl.spec(spec, policy=held)


@pytest.fixture
def autoreload(monkeypatch):
    """Let IPython's extension be loaded, which itself does nothing here."""
    monkeypatch.setitem(sys.modules, user_modules._AUTORELOAD, object())


@pytest.mark.slow
@pytest.mark.parametrize("edits", ["policy", "helper"])
def test_class_of_an_edited_module_is_the_newest_of_its_name_with_autoreload(
    edits, tmp_path, monkeypatch, both, autoreload
):
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    spec = write(tmp_path / "a")
    find_own_modules(tmp_path / "a")
    module = importlib.import_module("polu")
    held = module.P
    assert ttft(sl.run(spec, policy=held)) == both[0]
    write(tmp_path / "a", *(["-"] if edits == "policy" else ["+", "SIGN = -1\n"]))
    assert ttft(sl.run(spec, policy=held)) == both[1]
    assert sys.modules["polu"] is module
    assert ttft(sl.sweep(spec, policy=module.P, folder="kept")) == both[1]
    write(tmp_path / "a")
    assert ttft(sl.sweep(spec, policy=held, folder="kept")) == both[0]


def test_module_that_autoreload_keeps_is_executed_anew_where_it_is(tmp_path, autoreload):
    spec = write(tmp_path / "a")
    sl.spec(spec)
    policy, helper = import_own("polu"), sys.modules["helpu"]
    old = policy.P
    write(tmp_path / "a", "-", "OTHER = 1\n")
    find_own_modules()
    assert "SIGN" not in vars(helper)
    assert helper.OTHER == 1
    assert sys.modules["helpu"] is helper
    with pytest.raises(SpecError, match="cannot import name 'SIGN'"):
        sl.run(spec)
    assert policy.P is old  # as it was, and found by nobody
    assert "polu" not in sys.modules
    write(tmp_path / "a", "-", "SIGN = 2\n")
    find_own_modules()
    assert sys.modules["polu"] is policy
    assert policy.P is not old
    assert (policy.SIGN, helper.SIGN) == (2, 2)


def test_package_that_autoreload_keeps_is_executed_anew_where_it_is(tmp_path, autoreload):
    package = tmp_path / "packu"
    package.mkdir()
    (package / "__init__.py").write_text("N = 1\n")
    (package / "inner.py").write_text("from . import N\n")
    inner, outer = import_own("packu.inner"), sys.modules["packu"]
    (package / "__init__.py").write_text("N = 2\n")
    find_own_modules()
    assert (sys.modules["packu"], sys.modules["packu.inner"]) == (outer, inner)
    assert (outer.N, inner.N, outer.inner) == (2, 2, inner)


def test_class_from_another_folder_is_refused_with_autoreload(tmp_path, monkeypatch, autoreload):
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    write(tmp_path / "a")
    held = importlib.import_module("polu").P
    with pytest.raises(SpecError, match="or from another folder"):
        sl.spec(write(tmp_path / "b", "-"), policy=held)


@pytest.mark.slow
def test_ipython_with_autoreload_and_we_keep_one_module(tmp_path, both):
    pytest.importorskip("IPython")
    spec = write(tmp_path / "a")
    cells = (
        "%load_ext autoreload\n%autoreload 2",
        "import os, sys, schedlab as sl, polu\nfrom polu import P\n"
        "ttft = lambda cls: sl.run('spec.yaml', policy=cls).rows[0].mean('mean_ttft_ms')\n"
        "def edit(source):\n"
        "    open('polu.py', 'w').write(source)\n"
        "    edit.at = getattr(edit, 'at', 2_000_000_000) + 5\n"
        "    os.utime('polu.py', (edit.at, edit.at))\n"
        "seen = [ttft(P)]",
        f"edit({POLICY.format('-')!r})",
        "seen += [ttft(P), ttft(polu.P), sys.modules['polu'] is polu]",
        f"edit({POLICY.format('+')!r})",
        "seen += [ttft(polu.P), ttft(P), sys.modules['polu'] is polu]",
    )
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"for cell in {cells!r}:\n"
        "    shell.run_cell(cell).raise_error()\n"
        "print(shell.user_ns['seen'])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=spec.parent,
    )  # fmt: skip
    up, down = both
    assert told.stdout.splitlines()[-1] == str([up, down, down, True, up, up, True])


def test_module_that_nobody_edited_stays_the_same_one(tmp_path):
    spec = write(tmp_path / "a")
    sl.spec(spec)
    first = import_own("polu")
    write(tmp_path / "a")
    sl.spec(spec)
    assert import_own("polu") is first


def test_only_modules_that_import_the_edited_one_are_dropped(tmp_path):
    spec = write(tmp_path / "a")
    sl.spec(spec)
    policy, helper = import_own("polu"), sys.modules["helpu"]
    write(tmp_path / "a", "-")
    sl.spec(spec)
    assert import_own("polu") is not policy
    assert sys.modules["helpu"] is helper
    write(tmp_path / "a", "-", "SIGN = 2\n")
    sl.spec(spec)
    assert "polu" not in sys.modules or import_own("polu").SIGN == 2
    assert sys.modules["helpu"] is not helper


def test_package_of_ones_own_is_followed_with_what_is_above_its_modules(tmp_path):
    package = tmp_path / "packu"
    package.mkdir()
    (package / "__init__.py").write_text("N = 1\n")
    (package / "inner.py").write_text("from . import N\n")
    assert import_own("packu.inner").N == 1
    assert sources(["packu.inner"]).keys() == {"packu", "packu.inner"}
    (package / "__init__.py").write_text("N = 2\n")
    find_own_modules()
    assert import_own("packu.inner").N == 2


def test_module_that_comes_from_elsewhere_is_told_by_its_whole_name(tmp_path):
    for folder in (tmp_path / "here", tmp_path / "there"):
        (folder / "packu").mkdir(parents=True)
        (folder / "packu" / "__init__.py").write_text("")
        (folder / "packu" / "inner.py").write_text("N = 1\n")
    find_own_modules(tmp_path / "there")
    import_own("packu.inner")
    beside = tmp_path / "here" / "packu" / "inner.py"
    assert taken_from_elsewhere(tmp_path / "here", ["packu.inner:C", "packu.inner:D"]) == [
        f"module packu.inner is {sys.modules['packu.inner'].__file__}, which comes before {beside}"
    ]
    assert taken_from_elsewhere(tmp_path / "there", ["packu.inner:C"]) == []
    beside.unlink()
    assert taken_from_elsewhere(tmp_path / "here", ["packu.inner:C", "packu.none:C"]) == []


def test_module_that_went_away_is_dropped_and_one_that_is_broken_has_no_imports(tmp_path):
    (tmp_path / "helpu.py").write_text("N = 1\n")
    import_own("helpu")
    (tmp_path / "helpu.py").unlink()
    find_own_modules()
    with pytest.raises(ModuleNotFoundError):
        import_own("helpu")
    (tmp_path / "helpu.py").write_text("import (\n")
    assert sources(["helpu"]) == {"helpu": b"import (\n"}


def test_module_loaded_by_somebody_else_counts_as_changed_if_its_file_was_since(
    tmp_path, monkeypatch
):
    (tmp_path / "helpu.py").write_text("N = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(
            sys, "meta_path", [f for f in sys.meta_path if f is not user_modules._FINDER]
        )
        first = importlib.import_module("helpu")
    monkeypatch.setattr(user_modules, "_began", (tmp_path / "helpu.py").stat().st_mtime)
    assert import_own("helpu") is first
    assert sources(["helpu"]) == {"helpu": b"N = 1\n"}
    monkeypatch.setattr(user_modules, "_began", 0.0)
    find_own_modules()
    assert import_own("helpu") is not first


def test_point_is_refused_if_a_module_was_edited_before_the_run_imported_it(tmp_path, monkeypatch):
    file = write(tmp_path / "a")
    lazy = tmp_path / "a" / "lazyu.py"
    lazy.write_text("SIGN = 1\n")
    with (tmp_path / "a" / "polu.py").open("a") as policy:
        policy.write("\n    def on_finish_of_all(self):\n        import lazyu\n")
    job = Store(tmp_path / "kept").job(sl.spec(file), "x")
    assert own_modules(job.spec).keys() == {"polu", "helpu", "lazyu"}
    monkeypatch.setattr(
        "schedlab.experiments.running.run.run", lambda *_: lazy.write_text("SIGN = 2\n")
    )
    with pytest.raises(SchedlabError, match="changed while it runs"):
        jobs.run_point(job)
    assert not job.folder.exists()


def test_experiment_finds_its_modules_where_it_was_loaded_and_after_a_copy(tmp_path):
    spec = sl.spec(write(tmp_path / "a"))
    look_in(Places())
    assert spec.modules == Places(str(tmp_path / "a"), str(tmp_path))
    assert spec.model_copy(update={"seed": 3}).modules == spec.modules


@pytest.mark.slow
def test_module_edited_in_a_fresh_process_gives_what_was_kept(tmp_path):
    spec = write(tmp_path / "a")
    sl.spec(spec)
    write(tmp_path / "a", "-")
    found = ttft(sl.sweep(spec, folder="kept"))
    code = (
        "import sys, schedlab as sl; r = sl.sweep(sys.argv[1], folder='kept')\n"
        "print(r.rows[0].mean('mean_ttft_ms'), sl.run(sys.argv[1]).rows[0].mean('mean_ttft_ms'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(spec)], capture_output=True, text=True, check=True
    )
    assert list(map(float, told.stdout.split())) == [found, found]


@pytest.mark.parametrize("does", [sl.sweep, sl.find])
def test_class_of_a_notebook_is_kept_in_no_folder(monkeypatch, tmp_path, does):
    class Mine(ContinuousBatching):
        source = "mine"

    Mine.__module__, Mine.__qualname__ = "__main__", "Mine"
    monkeypatch.setattr(sys.modules["__main__"], "Mine", Mine, raising=False)
    asked = {**EXPERIMENT, "policy": Mine}
    if does is sl.find:
        asked["find"] = "max workload.request_rate subject to p99_ttft_ms <= 1000"
    with pytest.raises(SpecError, match="keeps results by the source of a policy"):
        does(asked, folder=tmp_path / "kept")


def test_modules_of_ours_inside_packages_and_of_others_are_nobodys_own(tmp_path):
    mine = tmp_path / "mine.py"
    own = [
        user_modules._own_file(ModuleSpec(name, None, origin=str(mine)))
        for name in ("mine", "package.mine", "schedlab", "schedlab.sim.rng", "schedlab_of_mine")
    ]
    found = mine.resolve()
    assert own == [found, found, None, None, found]
    for origin in (None, "built-in", str(tmp_path / "mine.so")):
        assert user_modules._own_file(ModuleSpec("mine", None, origin=origin)) is None
    assert user_modules._own_file(None) is None
