"""What runs once before the stack: keys, passwords, the bucket; and the beat's health check."""

import os
import subprocess
import sys
import time
from pathlib import Path

from producers.gateway.api_keys import KeyRing
from tests.support.deploy import ROOT
from tests.support.seaweed import Seaweed

PROGRAMS = ROOT / "deploy" / "compose"


def first_start(*arguments: str, **environ: str) -> tuple[int, str]:
    """Exit code, and what it said."""
    command = [sys.executable, PROGRAMS / "first_start.py", *arguments]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_one_more_key_opens_the_gateway_and_closes_no_other(tmp_path: Path) -> None:
    """
    Each is shown once, and named by whom it is for; a name is one key's alone.
    """
    _, said = first_start(f"--folder={tmp_path}", "secrets")
    code, added = first_start(f"--folder={tmp_path}", "key", "alice")
    again = first_start(f"--folder={tmp_path}", "key", "alice")

    assert 0 == code
    ring = KeyRing(tmp_path / "keys.toml")
    tenants = [ring.find(text.rpartition(": ")[2].strip()) for text in (said, added)]
    assert ["local", "alice"] == [key.tenant for key in tenants if key]
    assert (1, True) == (again[0], "choose another name" in again[1])


def test_the_status_page_is_opened_by_a_key_that_is_made_for_it(tmp_path: Path) -> None:
    """
    The first key is a tenant's, which programs have; another one sees all tenants.
    """
    _, said = first_start(f"--folder={tmp_path}", "secrets")
    _, added = first_start(f"--folder={tmp_path}", "key", "ops", "--operator")

    ring = KeyRing(tmp_path / "keys.toml")
    keys = [ring.find(text.rpartition(": ")[2].strip()) for text in (said, added)]
    assert [False, True] == [key.operator for key in keys if key]


def test_a_start_that_was_stopped_half_way_is_made_whole(tmp_path: Path) -> None:
    """
    Both halves of the S3 server's keys are drawn together.
    """
    (tmp_path / "aws_credentials").write_text("of a server that never read its half")

    assert 0 == first_start(f"--folder={tmp_path}", "secrets")[0]

    key = (tmp_path / "aws_credentials").read_text().split("aws_secret_access_key = ")[1].strip()
    assert key in (tmp_path / "s3.json").read_text()


def test_the_bucket_is_made_once_and_takes_objects(bucket: Seaweed) -> None:
    """
    A second start finds it; nothing is left in it.
    """
    url = f"s3://made-here/store?region=us-east-1&endpoint={bucket.endpoint}"

    for _ in range(2):
        assert (0, "the bucket made-here is there\n") == first_start("bucket", PAGEMILL_OBJECT_STORE=url)
    assert 0 == bucket.client().list_objects_v2(Bucket="made-here")["KeyCount"]


def test_a_store_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """
    A folder needs no bucket; one in a cloud, which has no endpoint of its own, is its owner's to make.
    """
    for url in (tmp_path.as_uri(), "s3://theirs/prefix?region=eu-central-1"):
        code, said = first_start("bucket", PAGEMILL_OBJECT_STORE=url)
        assert (0, True) == (code, "nothing to make" in said), said


def test_a_beat_that_no_longer_writes_is_not_healthy(tmp_path: Path) -> None:
    """
    Whatever the system's database adds to the file's name.
    """

    def is_fresh() -> int:
        return subprocess.run(
            [sys.executable, PROGRAMS / "is_fresh.py", tmp_path / "schedule", "600"], check=False
        ).returncode

    assert 1 == is_fresh(), "it has written nothing yet"
    (tmp_path / "schedule.db").touch()
    assert 0 == is_fresh()
    os.utime(tmp_path / "schedule.db", (time.time() - 601,) * 2)
    assert 1 == is_fresh()
