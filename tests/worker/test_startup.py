"""Mistakes of an operator: one sentence that says what to do, an exit code, no traceback."""

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from pagemill.client import Client
from producers.local_redis import local_redis
from tests.support.services import CHECKOUT, worker_process
from worker.process import served_names
from worker.settings import WorkerSettings


def start(*flags: str, **environment: str) -> tuple[int, str]:
    """Run a worker that will not come up; returns its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "worker", *flags],
        cwd=CHECKOUT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PAGEMILL_DEVICE": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def write_model(folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_unknown_flag_names_the_nearest() -> None:
    """
    A misspelt flag exits with 2 and names the flag that was meant.
    """
    code, said = start("--leese-s", "3")

    assert (2, "pagemill worker: unknown setting --leese-s: did you mean --lease-s?\n") == (code, said)


def test_an_unknown_variable_names_the_nearest() -> None:
    """
    So does a misspelt name in the environment.
    """
    code, said = start(PAGEMILL_MAX_NUM_SEQ="3")

    assert 2 == code
    assert "MAX_NUM_SEQS" in said


def test_a_wrong_value_names_the_setting() -> None:
    """
    A value out of range exits with 2 and names the setting and the value.
    """
    code, said = start("--max-num-seqs", "0")

    assert 2 == code
    assert "max_num_seqs" in said
    assert "0" in said


def test_a_server_that_is_not_there() -> None:
    """
    Without a server the worker names the address and the flag to set.
    """
    code, said = start("--engine", "fake", "--redis-url", "redis://127.0.0.1:1/0")

    assert 1 == code
    assert "127.0.0.1:1" in said
    assert "--redis-url" in said


def test_a_server_that_may_evict_jobs() -> None:
    """
    An eviction policy that deletes jobs is refused, unless the operator takes the risk.
    """
    with local_redis(options=("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")) as url:
        code, said = start("--engine", "fake", "--redis-url", url)

    assert 1 == code
    assert "allkeys-lru" in said
    assert "noeviction" in said


def test_a_missing_model(server_url: str, tmp_path: Path) -> None:
    """
    A model folder that is not there is named, with what may be given.
    """
    code, said = start("--redis-url", server_url, "--model", str(tmp_path / "nothing"))

    assert 1 == code
    assert str(tmp_path / "nothing") in said


def test_no_model_at_all(server_url: str) -> None:
    """
    Without a model the worker says which flag to set.
    """
    code, said = start("--redis-url", server_url)

    assert 1 == code
    assert "--model" in said


def test_an_unknown_architecture(server_url: str, tmp_path: Path) -> None:
    """
    An architecture that the engine lacks is named, beside those that it has.
    """
    folder = write_model(tmp_path / "model", architectures=["MambaForCausalLM"], model_type="mamba")
    code, said = start("--redis-url", server_url, "--model", str(folder))

    assert 1 == code
    assert "MambaForCausalLM" in said
    assert "LlamaForCausalLM" in said


def test_a_port_in_use(server_url: str) -> None:
    """
    A health port that another program has is named before anything is loaded.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = start("--engine", "fake", "--redis-url", server_url, "--health-port", port)

    assert 2 == code
    assert port in said
    assert "--health-port" in said


def test_a_worker_that_comes_up_says_what_it_can_hold(
    server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    The log names the KV cache in tokens and the concurrency at full length; health and status answer.
    """
    flags = ("--engine", "fake", "--redis-url", server_url, "--queue", queue, "--health-port", "0")
    environment = {"PAGEMILL_FAKE_KV_TOKENS": "4000", "PAGEMILL_MAX_MODEL_LEN": "1000"}
    with worker_process(tmp_path / "log", *flags, environment=environment) as worker:
        events = {event["event"]: event for event in worker.events()}
        port = events["health.listening"]["port"]
        answers = [_get(port, path) for path in ("/healthz", "/readyz", "/other")]
        client.result(client.submit(prompt="x", options={"max_tokens": 3}).job_id, wait_s=10)
        fields = next(iter(client.workers().values()))

    ready = events["engine.ready"]
    assert (4000, 1000, 4.0) == (
        ready["kv_cache_tokens"],
        ready["max_model_len"],
        ready["concurrency_at_max_model_len"],
    )
    assert [200, 200, 404] == answers
    expected = {"running", "waiting", "kv_usage", "tokens_per_s", "generated_tokens", "jobs_done", "model", "pid"}
    assert expected <= fields.keys()
    assert ("fake", "1000") == (fields["model"], fields["max_model_len"])


def _get(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize(
    ("flags", "folder", "names"),
    [
        (["--model", "smollm2"], "smollm2-135m-instruct", ["smollm2", "smollm2-135m-instruct"]),
        (["--model", "acme/tiny"], "acme--tiny", ["acme/tiny", "acme--tiny"]),
        (["--model", "/models/tiny-1.5.gguf"], "tiny-1.5-0123abcd", ["tiny-1.5", "tiny-1.5-0123abcd"]),
        (["--model", "smollm2", "--served-model-name", "mine"], "smollm2-135m-instruct", ["mine"]),
        (["--engine", "fake"], "fake", ["fake"]),
    ],
)
def test_a_worker_answers_to_the_name_it_was_started_with(flags: list[str], folder: str, names: list[str]) -> None:
    """
    The name of --model comes first and the folder's is an alias; a chosen name stands alone.
    """
    assert names == served_names(WorkerSettings.read(flags), folder)


def test_a_folder_answers_to_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    However the path to a folder is written, the name is the folder's.
    """
    folder = tmp_path / "tiny-1.5"
    folder.mkdir()
    monkeypatch.chdir(folder)

    assert ["tiny-1.5"] == served_names(WorkerSettings.read(["--model", "."]), "tiny-1.5")


def write_tiny_llama(folder: Path) -> Path:
    return write_model(
        folder,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=64,
        max_position_embeddings=2048,
    )


def test_not_enough_memory_for_one_sequence(server_url: str, tmp_path: Path) -> None:
    """
    A KV cache smaller than one sequence is refused with both numbers.
    """
    folder = write_tiny_llama(tmp_path / "model")
    flags = ("--model", str(folder), "--load-format", "dummy", "--kv-cache-bytes", "4096", "--swap-space-bytes", "0")
    code, said = start("--redis-url", server_url, "--device", "cpu", *flags)

    assert 1 == code
    assert "2,048" in said
    assert "kv_cache_bytes" in said
    assert "max_model_len" in said


def test_a_gpu_that_is_not_there(server_url: str, tmp_path: Path) -> None:
    """
    Where a GPU is asked for the worker does not fall back to the CPU: it says how to have that.
    """
    folder = write_tiny_llama(tmp_path / "model")
    flags = ("--model", str(folder), "--load-format", "dummy", "--device", "cuda")
    # hides the GPU of a machine that has one
    code, said = start("--redis-url", server_url, *flags, CUDA_VISIBLE_DEVICES="")

    assert 1 == code
    *_, last = said.splitlines()
    assert last.startswith("pagemill worker: ")
    assert "CUDA" in last
    assert "--device cpu runs on the CPU" in last


def test_more_memory_than_there_is_gives_the_figures(tmp_path: Path, server_url: str) -> None:
    """
    A KV cache larger than what is free is refused at once, not by the system under load.
    """
    folder = write_tiny_llama(tmp_path / "model")
    flags = ("--model", str(folder), "--load-format", "dummy", "--kv-cache-bytes", "10000GiB")
    code, said = start("--redis-url", server_url, "--device", "cpu", *flags)

    assert 1 == code
    assert "10,000.0 GiB" in said
    assert "lower them" in said
    assert "Traceback" not in said
