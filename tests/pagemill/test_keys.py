"""The names in Redis: one slot a queue, and what may stay."""

import re
from importlib.resources import files

import pytest

from pagemill import keys
from pagemill.errors import SettingsError
from pagemill.keys import QueueKeys, idempotency_name, is_permanent
from pagemill.scripts import SHARED


def test_all_names_carry_the_queues_tag() -> None:
    """
    A cluster puts all keys of a queue into one slot.
    """
    names = QueueKeys("night")

    assert {"{pagemill:night}"} == {
        name.partition("}")[0] + "}"
        for name in (names.base, names.bell("bulk"), names.events, names.job("1"), names.result("1"), names.worker("w"))
    }


@pytest.mark.parametrize("queue", ["", "a b", "a}b", "{a", "a:b", "x" * 129])
def test_a_name_that_breaks_the_tag_is_refused(queue: str) -> None:
    """
    A queue's name cannot change which slot its keys are in.
    """
    with pytest.raises(SettingsError):
        QueueKeys(queue)


def test_the_table_lists_what_the_scripts_use() -> None:
    """
    Every kind of key in the scripts stands in the table of keys.py.
    """
    used = set()
    for script in (files("pagemill") / "lua").iterdir():
        used |= set(re.findall(r"\bkey\('([a-z]+)'", script.read_text()))
    listed = set(re.findall(r"^    ([a-z]+)[: ]", keys.__doc__ or "", re.MULTILINE))

    assert set() == used - listed
    assert {"name"} == listed - used


def test_every_script_says_its_keys_and_arguments() -> None:
    """
    The head of a script lists what it reads and writes.
    """
    shared = {f"{name}.lua" for name in SHARED}
    scripts = [one for one in (files("pagemill") / "lua").iterdir() if one.name not in shared]

    heads = [one.read_text().partition("\n\n")[0] for one in scripts]

    assert 17 <= len(heads)
    assert all("KEYS[1]  base" in head and "-- ARGV" in head and "-- Returns" in head for head in heads)


def test_permanent_names() -> None:
    """
    What belongs to one job or worker may not stay for ever.
    """
    base = QueueKeys("q").base

    stays = [f"{base}:{name}" for name in ("s:bulk:t", "streams", "st", "ev", "tenants", "limits", "vt:bulk")]
    goes = [
        f"{base}:{name}"
        for name in ("j:1", "d:1", "r:1", "t:1", "ck:1", "idem:x", "w:1", "bell:bulk", "qt:bulk", "delayed")
    ]
    assert ([True] * len(stays), [False] * len(goes)) == ([*map(is_permanent, stays)], [*map(is_permanent, goes)])
    assert is_permanent(keys.MODELS)


def test_idempotency_names_do_not_mix_tenants() -> None:
    """
    Tenant and key are told apart, whatever they contain.
    """
    assert idempotency_name("a", "bc") != idempotency_name("ab", "c")
