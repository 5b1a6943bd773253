"""The requests that all engines are compared on never change."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import workloads


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("sharegpt", "43895ce3d71a"),
        ("fixed512", "9d8b6a71e1b6"),
        ("summarize", "dfd84e5c8b4a"),
        ("prefix", "0b18f43425f6"),
        ("single", "109159ab72d1"),
        ("batch32", "751cde840045"),
        ("groups", "71cd07517167"),
        ("longtail", "309010d027bf"),
    ],
)
def test_a_workload_has_its_digest(name: str, digest: str) -> None:
    """
    Every token of every workload is what it was when the peers were measured.
    """
    assert digest == workloads.digest(workloads.build(name))


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("sharegpt", "b5296115baf0"),
        ("fixed512", "2b75ef810329"),
        ("summarize", "9116ebcc0369"),
        ("prefix", "4cb07bd12c63"),
        ("single", "eead7875e78a"),
        ("batch32", "2af65377badb"),
        ("groups", "005d9aa6252a"),
        ("longtail", "b971bc8b8226"),
    ],
)
def test_scale_and_vocabulary_have_their_digest(name: str, digest: str) -> None:
    """
    Fewer, shorter requests for a smaller vocabulary are pinned too: they are the CPU's.
    """
    assert digest == workloads.digest(workloads.build(name, n=64, vocab=49152, scale=0.3))


def test_a_digest_sees_one_token() -> None:
    """
    Requests that differ in one token or one length have different digests.
    """
    base = [workloads.Request([1, 2, 3], 4)]

    assert workloads.digest(base) != workloads.digest([workloads.Request([1, 2, 4], 4)])
    assert workloads.digest(base) != workloads.digest([workloads.Request([1, 2, 3], 5)])


def test_sharegpt_has_the_lengths_that_it_names() -> None:
    """
    The mean lengths are 220 in and 200 out, and none is over 1,024.
    """
    totals = workloads.totals(workloads.build("sharegpt"))

    assert 220 == pytest.approx(totals["mean_in"], abs=1)
    assert 200 == pytest.approx(totals["mean_out"], abs=1)
    assert 1024 == max(totals["max_in"], totals["max_out"])


def test_ids_stay_below_the_vocabulary() -> None:
    """
    A small vocabulary gets no id that its model does not have.
    """
    requests = workloads.build("batch32", vocab=1024)

    assert 1024 > max(max(request.prompt) for request in requests)


def test_all_prompts_of_prefix_begin_alike() -> None:
    """
    The prefix workload shares exactly its first 2,048 tokens.
    """
    first, second = workloads.build("prefix", n=2)

    assert first.prompt[:2048] == second.prompt[:2048]
    assert first.prompt[2048] != second.prompt[2048]


def test_four_prompts_of_groups_begin_alike_and_are_not_together() -> None:
    """
    Each prefix of 700 tokens has four requests, in random places.
    """
    requests = workloads.build("groups")
    heads = [tuple(request.prompt[:700]) for request in requests]

    assert {4: 300} == Counter(Counter(heads).values())
    assert 10 > sum(first == second for first, second in pairwise(heads))
    assert len(requests) == len({tuple(request.prompt[:701]) for request in requests})


def test_one_answer_of_longtail_in_twenty_is_long() -> None:
    """
    5 % have 4,096 tokens, anywhere among the others, and these are as long as those of sharegpt.
    """
    outputs = [request.max_tokens for request in workloads.build("longtail")]

    assert 50 == outputs.count(4096)
    assert 1024 >= max(tokens for tokens in outputs if tokens < 4096)
    assert 10 < sum(tokens == 4096 for tokens in outputs[:500]) < 40


def test_a_result_line_tells_missing_tokens() -> None:
    """
    Rates are of what was produced, and a line says when that is not what was asked for.
    """
    line = workloads.result_line("e", "m", "w", [workloads.Request([1, 2], 4)], 2.0, 3, mode="x")

    assert 1.5 == line["output_tok_s"]
    assert 2.5 == line["total_tok_s"]
    assert "expected 4 output tokens" == line["note"]
    assert "x" == line["mode"]


def test_a_dump_is_what_was_built(tmp_path: Path) -> None:
    """
    A dumped workload can be read by an engine that has no Python, token for token.
    """
    lines: list[str] = []
    workloads.main(["--dump", "single", str(tmp_path / "out.json")], emit=lines.append)

    rows = json.loads((tmp_path / "out.json").read_text())
    requests = [workloads.Request(row["prompt_token_ids"], row["max_tokens"]) for row in rows]

    assert json.loads(lines[0])["digest"] == workloads.digest(requests)
