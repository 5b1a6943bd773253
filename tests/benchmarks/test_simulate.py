"""A run that is simulated is the scheduler's own, at prices that come near to what was measured."""

import json
from typing import Any

import pytest

from benchmarks import simulate, workloads


def lines(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    assert 0 == simulate.main(args)
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


# seconds that an H200 took under the policy "throughput", and under "fcfs"
MEASURED = {
    "llama-3.1-8b": {
        "sharegpt": 14.36,
        "fixed512": 22.66,
        "summarize": 28.55,
        "prefix": 1.96,
        "single": 3.958,
        "batch32": 1.323,
    },
    "qwen2.5-0.5b": {
        "sharegpt": 2.05,
        "fixed512": 2.12,
        "summarize": 2.56,
        "prefix": 0.39,
        "single": 0.585,
        "batch32": 0.220,
        "groups": 1.49,
        "longtail": 6.34,
    },
}
MEASURED_FCFS = {"groups": 1.81, "longtail": 6.39}
# of `longtail` on an earlier engine that paced whatever the model: seconds paced over those under "fcfs"
PACED = 7.62 / 6.99


@pytest.mark.parametrize("model", MEASURED)
def test_times_are_near_to_those_measured(capsys: pytest.CaptureFixture[str], model: str) -> None:
    """
    What an H200 took for a workload is met to a tenth.
    """
    measured = MEASURED[model]
    found = lines(capsys, "--model", model, "--workloads", ",".join(measured), "--policies", "throughput")

    assert {line["workload"]: line["wall_s"] for line in found} == pytest.approx(measured, rel=0.1)


def test_times_without_an_order_are_near_to_those_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """
    First come, first served, too.
    """
    names = ",".join(MEASURED_FCFS)
    found = lines(capsys, "--model", "qwen2.5-0.5b", "--workloads", names, "--policies", "fcfs")

    assert {line["workload"]: line["wall_s"] for line in found} == pytest.approx(MEASURED_FCFS, rel=0.1)


def test_steps_are_those_that_were_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """
    There are as many as the engine took.
    """
    found = lines(capsys, "--workloads", "summarize,prefix,batch32", "--policies", "fcfs")

    assert [357, 133, 256] == [line["steps"] for line in found]


def test_what_pacing_costs_a_small_model_is_met(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Paced all the same, as it was when it was measured, it takes longer, and by as much to a few percent.
    """
    monkeypatch.setattr(simulate, "is_worthwhile", lambda read_s: True)  # noqa: ARG005
    found = lines(capsys, "--model", "qwen2.5-0.5b", "--workloads", "longtail")
    seconds = {line["policy"]: line["wall_s"] for line in found}

    assert seconds["throughput"] / seconds["fcfs"] == pytest.approx(PACED, abs=0.03)


@pytest.mark.parametrize("workload", ["sharegpt", "longtail", "groups"])
def test_a_small_model_with_room_is_not_behind_first_come_first_served(
    capsys: pytest.CaptureFixture[str], workload: str
) -> None:
    """
    It is not paced, and the order alone costs nothing.
    """
    fcfs, throughput = lines(capsys, "--model", "qwen2.5-0.5b", "--workloads", workload)

    assert throughput["wall_s"] <= fcfs["wall_s"]


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


def test_throughput_is_ahead_and_has_no_tail(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("model", MEASURED)
def test_long_answers_do_not_keep_a_small_pool_for_their_ends(capsys: pytest.CaptureFixture[str], model: str) -> None:
    """
    In a pool that half of the long answers fill at their ends more of them run, and few are preempted.
    """
    fcfs, throughput = lines(capsys, "--model", model, "--workloads", "longtail", "--kv-tokens", "50000", "--n", "400")

    assert throughput["wall_s"] < fcfs["wall_s"]
    assert 0 < throughput["preemptions"] < fcfs["preemptions"]


def test_what_will_not_fit_is_not_let_in(capsys: pytest.CaptureFixture[str]) -> None:
    """
    In a pool that limits the batch nobody is preempted, as all lengths are known.
    """
    (line,) = lines(capsys, "--workloads", "sharegpt", "--policies", "throughput", "--kv-tokens", "50000", "--n", "300")

    assert 0 == line["preemptions"]
