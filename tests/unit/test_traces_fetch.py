"""Fetching a published trace, against a server of this machine that misbehaves as it is told."""

import contextlib
import errno
import hashlib
import http.server
import io
import shutil
import threading
import time
import urllib.parse
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from schedlab import traces
from schedlab.experiments.commands import trace_fetch
from schedlab.experiments.commands.app import app
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.errors import SpecError, TraceError
from schedlab.traces import PRESETS, PUBLISHED, fetch
from schedlab.traces.published import PublishedTrace, cache_folder, published
from tests.data_folder import data_folder

ROWS = "\n".join(
    f"2023-11-16 18:{i // 600:02d}:{i / 10 % 60:04.1f},{i % 700 + 9},7" for i in range(9000)
)
CONTENT = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{ROWS}\n".encode()
NAME = "azure-2023-conv"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.ranges.append(self.headers.get("Range"))
        asked = self.headers.get("Range") if server.knows_ranges else None
        if server.redirect:
            self.send_response(302)
            self.send_header("Location", server.redirect)
            self.end_headers()
            server.redirect = None
            return
        if server.status != 200:
            self.send_error(server.status)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        body = server.content[start:]
        self.send_response(206 if asked else 200)
        if asked:
            size = len(server.content)
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for byte in body if server.drip_s else ():
                self.wfile.write(bytes([byte]))
                time.sleep(server.drip_s)
            self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """Serve `content`; each of `cuts` ends one connection after so many bytes."""
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.content, found.cuts, found.ranges = CONTENT, [], []
    found.status, found.knows_ranges, found.redirect, found.drip_s = 200, True, None, 0
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture
def trace(server, tmp_path, monkeypatch):
    """Publish CONTENT under a real name, on this server, with an empty cache."""
    monkeypatch.setenv("SCHEDLAB_CACHE", str(tmp_path / "cache"))
    # A proxy of the machine must not be asked for 127.0.0.1.
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    one = PublishedTrace(
        name=NAME,
        summary="made up",
        url=f"http://127.0.0.1:{server.server_port}/data/some.csv",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
        licence="CC-BY 4.0",
        cite="Nobody",
    )
    monkeypatch.setitem(PUBLISHED, NAME, one)
    return one


def part_of(trace):
    return trace.path.with_name(f"{trace.path.name}.part")


def test_fetch_brings_the_file_and_tells_progress(trace):
    told = []
    found = fetch.fetch(trace, progress=lambda *numbers: told.append(numbers))
    assert found == (trace.path, "downloaded")
    assert trace.path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert len(told) > 1
    assert not part_of(trace).exists()


def test_fetch_again_asks_nobody(trace, server):
    fetch.fetch(trace)
    assert fetch.fetch(trace).how == "already there"
    assert len(server.ranges) == 1


def test_fetch_of_a_damaged_file_replaces_it(trace):
    fetch.fetch(trace)
    trace.path.write_bytes(b"x" * len(CONTENT))
    assert fetch.fetch(trace).how == "downloaded"
    assert trace.path.read_bytes() == CONTENT


def test_fetch_goes_on_by_itself_when_the_connection_is_cut(trace, server):
    server.cuts = [70_000, 1000]
    assert fetch.fetch(trace).path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=70000-", "bytes=71000-"]


def test_fetch_that_was_given_up_is_resumed_by_the_next(trace, server):
    server.cuts = [50_000, 0, 0, 0]
    with pytest.raises(TraceError, match=r"50,000 bytes are kept, the same command goes on"):
        fetch.fetch(trace)
    assert not trace.path.exists()
    assert part_of(trace).read_bytes() == CONTENT[:50_000]
    assert fetch.fetch(trace) == (trace.path, "resumed")
    assert server.ranges[-1] == "bytes=50000-"
    assert trace.path.read_bytes() == CONTENT


def test_fetch_of_a_whole_but_unmoved_file_asks_nobody(trace, server):
    trace.path.parent.mkdir(parents=True)
    part_of(trace).write_bytes(CONTENT)
    assert fetch.fetch(trace).how == "resumed"
    assert server.ranges == []


def test_fetch_from_a_server_without_ranges_starts_over(trace, server):
    server.knows_ranges = False
    trace.path.parent.mkdir(parents=True)
    part_of(trace).write_bytes(CONTENT[:1234])
    assert fetch.fetch(trace).path.read_bytes() == CONTENT


def test_fetch_after_a_spoilt_part_says_so_and_then_works(trace):
    trace.path.parent.mkdir(parents=True)
    part_of(trace).write_bytes(b"spoilt")
    with pytest.raises(TraceError, match=r"wrong checksum.*thrown away"):
        fetch.fetch(trace)
    assert not part_of(trace).exists()
    assert fetch.fetch(trace).how == "downloaded"


def test_fetch_of_a_longer_part_than_the_file_starts_over(trace):
    trace.path.parent.mkdir(parents=True)
    part_of(trace).write_bytes(CONTENT + b"more")
    assert fetch.fetch(trace).path.read_bytes() == CONTENT


def test_fetch_of_another_content_is_refused_by_checksum(trace, server):
    server.content = CONTENT.replace(b",7\n", b",8\n")
    with pytest.raises(TraceError, match=r"wrong checksum: SHA-256 \w{64}, published as \w{64}"):
        fetch.fetch(trace)
    assert not trace.path.exists()


def test_fetch_of_a_longer_file_is_refused_before_it_fills_the_disk(trace, server):
    server.content = CONTENT * 50
    with pytest.raises(TraceError, match="it is another file"):
        fetch.fetch(trace)
    assert list(trace.path.parent.iterdir()) == []


def test_fetch_of_what_the_server_lacks_names_the_status_and_the_way_out(trace, server):
    server.status = 404
    with pytest.raises(TraceError, match=r"answers 404 .*--url, or download it elsewhere and put"):
        fetch.fetch(trace)


def test_fetch_without_network_says_so_and_leaves_nothing(trace, server):
    server.shutdown()
    server.server_close()
    with pytest.raises(TraceError, match=r"cannot be reached: .*refused"):
        fetch.fetch(trace)
    assert list(trace.path.parent.iterdir()) == []


def test_fetch_without_room_says_so_before_it_begins(trace, server, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(TraceError, match=r"0\.3 MB to fetch, but 0\.0 MB free"):
        fetch.fetch(trace)
    assert server.ranges == []
    fetch._check_space(trace.path.parent, 1000)
    with pytest.raises(TraceError, match="SCHEDLAB_CACHE names another folder"):
        fetch._check_space(trace.path.parent, 1001)


def test_fetch_onto_a_disk_that_fills_up_keeps_what_came(trace, monkeypatch):
    class Full:
        """A file on a disk with 100 kB of room, of which single writes take less than asked."""

        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            room = 100_000 - self.file.seek(0, 2)
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(bytes(data[: min(room, 40_000)]))

    appended = fetch._append
    monkeypatch.setattr(fetch, "_append", lambda url, file, *rest: appended(url, Full(file), *rest))
    with pytest.raises(TraceError, match=r"disk full; 100,000 bytes are kept.*SCHEDLAB_CACHE"):
        fetch.fetch(trace)
    assert part_of(trace).read_bytes() == CONTENT[:100_000]
    monkeypatch.setattr(fetch, "_append", appended)
    assert fetch.fetch(trace) == (trace.path, "resumed")
    assert trace.path.read_bytes() == CONTENT


def test_fetch_while_another_does_is_refused(trace):
    with fetch._part_file(trace), pytest.raises(TraceError, match="by another process"):
        fetch.fetch(trace)


def test_fetch_into_a_folder_that_cannot_be_made_names_it(trace, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SCHEDLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(TraceError, match=r"file/traces/.*cannot write: Not a directory"):
        fetch.fetch(trace)


def test_fetch_from_a_mirror_asks_the_mirror(trace, server):
    mirror = urllib.parse.urljoin(trace.url, "/mirror.csv")
    elsewhere = PublishedTrace(**{**vars(trace), "url": "http://127.0.0.1:1/gone.csv"})
    assert fetch.fetch(elsewhere, mirror).path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hello", "must begin with https, http, file"),
        ("data:text/plain,hello", "must begin with https, http, file"),
        ("http://[::1/", "is no URL"),
        ("http://127.0.0.1/\xfc", "%XX"),
    ],
)
def test_fetch_from_no_url_says_so_and_leaves_nothing(trace, url, message):
    with pytest.raises(TraceError, match=message):
        fetch.fetch(trace, url)
    assert not trace.path.parent.exists()


def test_fetch_from_another_local_file_is_refused_and_leaves_nothing(trace, tmp_path):
    (tmp_path / "other").write_text("secret")
    with pytest.raises(TraceError, match=r"6 bytes, not the 2\S+ published"):
        fetch.fetch(trace, (tmp_path / "other").as_uri())
    assert list(trace.path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("file:///etc/passwd", "not allowed"),
        ("http://10.0.0.1/x", "a private address"),
        ("http://[::ffff:10.0.0.1]/x", "a private address"),
        ("ftp://198.51.100.1/x", "which is not http"),
    ],
)
def test_fetch_follows_no_server_into_the_own_network(trace, server, monkeypatch, to, message):
    server.redirect = to
    private = fetch._is_private
    monkeypatch.setattr(fetch, "_is_private", lambda host: host != "127.0.0.1" and private(host))
    with pytest.raises(TraceError, match=message):
        fetch.fetch(trace)
    assert list(trace.path.parent.iterdir()) == []


def test_fetch_takes_a_copy_on_this_machine(trace, tmp_path):
    (tmp_path / "copy").write_bytes(CONTENT)
    fetched = fetch.fetch(trace, (tmp_path / "copy").as_uri())
    assert (fetched.path.read_bytes(), fetched.how) == (CONTENT, "downloaded")


def test_fetch_follows_a_server_elsewhere(trace, server):
    server.redirect = urllib.parse.urljoin(trace.url, "/elsewhere.csv")
    assert fetch.fetch(trace).path.read_bytes() == CONTENT


def test_fetch_that_only_keeps_us_waiting_is_given_up(trace, server, monkeypatch):
    monkeypatch.setattr(fetch, "_TIMEOUT_S", 0.2)
    server.drip_s = 0.02
    with pytest.raises(TraceError, match=r"bytes a second came; \d+ bytes are kept"):
        fetch.fetch(trace)


def test_cache_folder_is_the_first_that_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SCHEDLAB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "schedlab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "schedlab"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache_folder()) == "/xdg/schedlab"
    monkeypatch.setenv("SCHEDLAB_CACHE", "/own")
    assert str(cache_folder()) == "/own"


def test_published_traces_are_well_formed_and_no_preset_has_their_names():
    assert not set(PUBLISHED) & set(PRESETS)
    for name, one in PUBLISHED.items():
        assert one.name == name
        assert one.url.startswith("https://")
        assert len(bytes.fromhex(one.sha256)) == 32
        assert one.path.suffix in (".csv", ".jsonl")
    with pytest.raises(TraceError, match="did you mean mooncake-2025-conversation"):
        published("mooncake-conversation")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure-2023-conv", "azure_2023/AzureLLMInferenceTrace_conv.csv"),
        ("azure-2023-code", "azure_2023/AzureLLMInferenceTrace_code.csv"),
        ("mooncake-2025-conversation", "mooncake/conversation_trace.jsonl"),
        ("mooncake-2025-synthetic", "mooncake/synthetic_trace.jsonl"),
    ],
)
def test_published_checksums_are_those_of_the_files_and_a_file_is_a_mirror(
    name, file, tmp_path, monkeypatch
):
    monkeypatch.setenv("SCHEDLAB_CACHE", str(tmp_path))
    source = data_folder() / "traces" / file
    assert fetch.fetch(published(name), source.as_uri()).how == "downloaded"
    assert published(name).fetched().read_bytes() == source.read_bytes()
    assert traces.detect_format(published(name).path) == name.partition("-")[0]


@pytest.mark.slow
def test_run_of_a_fetched_trace_by_name_is_that_of_the_file(trace):
    fetch.fetch(trace)
    workload = {"num_requests": 30, "request_rate": 4.0}
    by_name = make_spec({"workload": {"trace": NAME, **workload}})
    by_path = make_spec({"workload": {"trace": str(trace.path), **workload}})
    assert by_name.workload.trace == NAME
    assert run(by_name).metrics() == pytest.approx(run(by_path).metrics(), nan_ok=True, rel=0)
    assert len(spec_hash(by_name)) == 64
    assert len(traces.read(NAME)) == 9000


def test_spec_with_a_trace_that_was_not_fetched_says_how(trace):
    with pytest.raises(
        SpecError, match=rf"^workload\.trace: .*not on this machine .*: schedlab trace fetch {NAME}"
    ):
        make_spec({"workload": {"trace": NAME}})
    with pytest.raises(TraceError, match=f"schedlab trace fetch {NAME}"):
        traces.read(NAME)


def test_spec_with_a_fetched_trace_that_was_cut_says_so(trace):
    fetch.fetch(trace)
    trace.path.write_bytes(CONTENT[:-5])
    with pytest.raises(SpecError, match="bytes where azure-2023-conv as published has"):
        make_spec({"workload": {"trace": NAME}})


def test_spec_with_the_file_name_of_a_published_trace_names_the_command(trace):
    with pytest.raises(SpecError, match=r"no such file: .*schedlab trace fetch azure-2023-code"):
        make_spec({"workload": {"trace": "./AzureLLMInferenceTrace_code.csv"}})


def test_fetch_command_fetches_lists_and_states_the_licence(trace):
    runner = CliRunner()
    listed = runner.invoke(app, ["trace", "fetch", "--list"])
    assert all(name in listed.output for name in PUBLISHED)
    done = runner.invoke(app, ["trace", "fetch", NAME])
    assert done.exit_code == 0
    assert f"{NAME}: downloaded: {trace.path}" in done.output
    assert "licence CC-BY 4.0; cite Nobody" in done.output
    assert "already there" in runner.invoke(app, ["trace", "fetch", NAME]).output
    assert "9,000 requests" in runner.invoke(app, ["trace", "describe", NAME]).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what to fetch"),
        (["azure-2023-con"], "did you mean azure-2023-conv?"),
        (["azure-2023-conv", "azure-2023-code", "--url", "http://x/y"], "name one trace"),
    ],
)
def test_fetch_command_with_bad_input_exits_2(trace, arguments, message):
    done = CliRunner().invoke(app, ["trace", "fetch", *arguments])
    assert done.exit_code == 2
    assert message in done.output


class Answer(io.BytesIO):
    """A server's answer that comes in pieces, with headers, while a clock goes on."""

    def __init__(self, pieces, headers, clock):
        super().__init__()
        self.headers, self._pieces, self._clock = headers, list(pieces), clock

    def read1(self, size=-1):
        assert size == 1 << 16
        if not self._pieces:
            return b""
        passed_s, piece = self._pieces.pop(0)
        self._clock[0] += passed_s
        return piece


@pytest.fixture
def part(tmp_path):
    """Return what makes a file of some bytes, opened as what is fetched is."""
    return lambda content=b"": Part(tmp_path / "part", content)


class Part(io.FileIO):
    """A file that is appended to, and read without moving in it."""

    def __init__(self, path, content):
        path.write_bytes(content)
        super().__init__(path, "ab")
        self.path = path

    @property
    def content(self):
        return self.path.read_bytes()


def appended(monkeypatch, file, pieces, num_bytes, headers=(), url="https://there/x"):
    """Append what a server sends; return what it was asked, and what was told of progress."""
    clock, told, asked = [100.0], [], []

    def opened(request, timeout):
        asked.append((request.full_url, dict(request.header_items()), timeout))
        return Answer(pieces, dict(headers), clock)

    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(
        fetch.urllib.request, "build_opener", lambda *handlers: SimpleNamespace(open=opened)
    )
    fetch._append(url, file, num_bytes, lambda *given: told.append(given))
    return asked, told


def test_bytes_are_appended_to_what_is_there_if_the_server_goes_on_from_it(monkeypatch, part):
    file = part(b"abc")
    pieces, ranged = [(1, b"de"), (2, b"f")], {"Content-Range": "bytes 3-5/6"}
    asked, told = appended(monkeypatch, file, pieces, 6, ranged)
    headers = {"User-agent": "schedlab", "Range": "bytes=3-"}
    assert asked == [("https://there/x", headers, 15.0)]
    assert told == [(5, 6), (6, 6)]
    assert file.content == b"abcdef"
    # It sends the whole file, or from another place on: what was there is thrown away.
    for other in ({}, {"Content-Range": "bytes 30-5/6"}):
        file = part(b"abc")
        assert appended(monkeypatch, file, [(1, b"uvwxyz")], 6, other)[1] == [(6, 6)]
        assert file.content == b"uvwxyz"
    asked, _ = appended(monkeypatch, part(), [(1, b"uvwxyz")], 6)
    assert "Range" not in asked[0][1]


def test_file_that_is_longer_or_a_copy_that_is_shorter_is_another_one(monkeypatch, part):
    file = part(b"abc")
    ranged = {"Content-Range": "bytes 3-"}
    with pytest.raises(fetch._OtherFileError, match="more than the 5 bytes of the published file"):
        appended(monkeypatch, file, [(1, b"def")], 5, ranged)
    assert file.content == b""
    file = part()
    with pytest.raises(fetch._CutOffError, match="the connection ended after 3 of 1,005 bytes"):
        appended(monkeypatch, file, [(1, b"def")], 1005)
    assert file.content == b"def"
    with pytest.raises(fetch._OtherFileError, match="6 bytes, not the 1,005 published"):
        appended(monkeypatch, part(b"abc"), [(1, b"def")], 1005, ranged, "file:///x")


@pytest.mark.parametrize(
    ("pieces", "rate"),
    [
        # Of 4096 a second, over more than 15 s, and of those since then.
        ([(0, 60_000), (15, 1000), (1, 4096 * 16 - 61_000)], None),
        ([(0, 60_000), (15, 1000), (1, 4096 * 16 - 61_001)], "4,096"),
        ([(0, 70_000), (16, 10), (16, 4096 * 16 - 1)], "4,096"),
        ([(16, 4096 * 16), (15.5, 62_000)], "4,000"),
        ([(15, 10), (0.1, 10)], "1"),
        ([(15, 10), (0.0, 70_000), (15, 10)], "2,334"),
    ],
)
def test_server_is_given_up_that_sends_too_little_since_the_last_look(
    monkeypatch, part, pieces, rate
):
    sent = [(seconds, bytes(size)) for seconds, size in pieces]
    total = sum(size for _, size in pieces)
    if rate is None:
        appended(monkeypatch, part(), sent, total)
        return
    with pytest.raises(fetch._TooSlowError, match=f"no more than {rate} bytes a second came"):
        appended(monkeypatch, part(), sent, total)


def test_failure_is_told_with_what_is_kept_and_what_to_do(tmp_path):
    trace = SimpleNamespace(path=tmp_path / "trace.csv")
    part = tmp_path / "trace.csv.part"
    part.write_bytes(bytes(1234))
    by_hand = f"or download it elsewhere and put it at {trace.path}"
    kept = "; 1,234 bytes are kept, the same command goes on from there"
    http = fetch.urllib.error.HTTPError("u", 503, "Busy", {}, None)
    told = {
        OSError(errno.ENOSPC, "full"):
            f"{tmp_path}: disk full{kept} (SCHEDLAB_CACHE names another folder)",
        OSError(errno.EDQUOT, "quota"):
            f"{tmp_path}: disk full{kept} (SCHEDLAB_CACHE names another folder)",
        OSError("odd"): f"u: odd{kept}",
        http: f"u: the server answers 503 Busy{kept}; give a mirror with --url, {by_hand}",
        fetch.urllib.error.URLError("no route"):
            f"u: cannot be reached: no route{kept}; try again with a network, {by_hand}",
        fetch._OtherFileError("sum differs"): "u: sum differs: it is another file",
    }  # fmt: skip
    for error, text in told.items():
        assert fetch._explained(error, "u", trace, part) == text
    part.write_bytes(b"")
    assert fetch._explained(OSError("odd"), "u", trace, part) == "u: odd"


def test_bar_of_a_fetch_says_megabytes_and_is_as_long_as_the_share_that_came():
    drawn = []
    trace_fetch._draw(lambda *given: drawn.append(given), "azure", 1_500_000, 6_000_000)
    trace_fetch._draw(None, "azure", 1, 2)
    assert drawn == [("azure: 1.5 of 6.0 MB", 0.25)]


def test_download_is_given_up_after_three_attempts_in_a_row_that_bring_nothing(monkeypatch):
    def tried(pieces):
        file, attempts = io.BytesIO(), iter(pieces)

        def append(url, file, num_bytes, progress):
            piece = next(attempts)
            file.write(piece)
            if file.tell() < num_bytes:
                raise TimeoutError("cut off")

        monkeypatch.setattr(fetch, "_append", append)
        fetch._download("u", file, 4, None)
        return file.getvalue()

    some, none = b"x", b""
    assert (
        tried([none, none, some, none, none, some, none, none, some, none, none, some]) == b"xxxx"
    )
    assert tried([some] * 4) == b"xxxx"
    for pieces in ([none] * 3, [some, none, none, none], [none, none, some, none, none, none]):
        with pytest.raises(fetch._CutOffError, match="cut off"):
            tried([*pieces, b"xxxx"])
