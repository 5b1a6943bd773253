"""A run that is simulated is the scheduler's own, at prices that come near to what was measured."""

import json

import pytest

from benchmarks import simulate, workloads


def lines(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, float]]:
    assert 0 == simulate.main(args)
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_times_are_near_to_those_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """
    What an H200 took for the 8B model is met to a twentieth, and its steps one by one.
    """
    found = lines(capsys, "--workloads", "summarize,prefix,batch32", "--policies", "fcfs")

    assert [357, 133, 256] == [line["steps"] for line in found]
    assert all(line["over_measured"] == pytest.approx(1, abs=0.05) for line in found)


def test_a_line_says_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """
    Prompts, decodes and waiting for the processor are all of it, and the tail is of the decodes.
    """
    (line,) = lines(capsys, "--workloads", "sharegpt", "--policies", "fcfs", "--n", "100", "--model", "qwen2.5-0.5b")

    parts = line["prefill_s"] + line["decode_s"] + line["idle_s"]
    assert line["wall_s"] == pytest.approx(parts, abs=0.01)
    assert 0 < line["tail_s"] < line["decode_s"]
    output = sum(request.max_tokens for request in workloads.build("sharegpt", n=100))
    assert line["output_tok_s"] == pytest.approx(output / line["wall_s"], rel=0.01)


def test_throughput_is_never_behind_and_has_no_tail(capsys: pytest.CaptureFixture[str]) -> None:
    """
    It takes no step more than the longest answer has tokens, and the last ones are not small.
    """
    fcfs, throughput = lines(capsys, "--workloads", "sharegpt", "--n", "500")

    assert throughput["wall_s"] < 0.99 * fcfs["wall_s"]
    assert throughput["steps"] < fcfs["steps"]
    assert throughput["tail_s"] < 0.2 * fcfs["tail_s"]


def test_groups_find_their_prefix_in_a_small_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """
    Where a prefix does not stay cached until its group's last member comes, these come together.
    """
    fcfs, throughput = lines(capsys, "--workloads", "groups", "--kv-tokens", "50000", "--n", "800")

    assert throughput["prefix_hit_tokens"] > 2 * fcfs["prefix_hit_tokens"]
    assert throughput["wall_s"] < 0.8 * fcfs["wall_s"]


def test_what_will_not_fit_is_not_let_in(capsys: pytest.CaptureFixture[str]) -> None:
    """
    In a pool that limits the batch nobody is preempted, as all lengths are known.
    """
    (line,) = lines(capsys, "--workloads", "sharegpt", "--policies", "throughput", "--kv-tokens", "50000", "--n", "300")

    assert 0 == line["preemptions"]
