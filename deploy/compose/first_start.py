"""
What the stack needs before its services start; docker-compose.yml runs it, docs/stack.md tells of it.

    first_start.py secrets      # keys and passwords, each made where there is none yet, and shown once
    first_start.py key NAME     # one more API key; with --operator one that opens the status page
    first_start.py bucket       # the bucket of PAGEMILL_OBJECT_STORE

No password is in a file of the repository: each stack draws its own, into the volume `secrets`.
"""

import argparse
import json
import os
import secrets
import sys
import time
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from pagemill.errors import ObjectStoreError, PagemillError, SettingsError
from pagemill.object_store import open_store
from pagemill.s3_store import S3Store
from pagemill.settings import ClientSettings
from producers.gateway.api_keys import KeyRing, entry, new_key

# its group may read them: Grafana's container has it
MODE = 0o640

# what all of the stack may do in its own S3 server
ACTIONS = ("Admin", "Read", "Write", "List", "Tagging")

# how long a server may take until it takes objects
WRITES_S = 60.0


def make_secrets(folder: Path) -> None:
    """
    Make what is missing; what is there stays, also where an earlier run was stopped half-way.

    The API key is shown and not kept: its file has a hash.
    """
    if not (folder / "s3.json").exists():
        access, secret = f"pagemill-{secrets.token_hex(4)}", secrets.token_urlsafe(32)
        _write(folder / "aws_credentials", _credentials(access, secret))
        # last: it says that both are there
        _write(folder / "s3.json", _identities(access, secret))
    if not (folder / "grafana_password").exists():
        password = secrets.token_urlsafe(16)
        _write(folder / "grafana_password", password)
        print(f"Grafana, user admin: {password}", flush=True)
    if not (folder / "keys.toml").exists():
        _show_key("local", folder, "")


def add_key(folder: Path, name: str, *, operator: bool = False) -> None:
    """
    Args:
        operator: It may look at the status page, of all tenants.

    Raises:
        SettingsError: there is one of that name, or it is no name.
    """
    path = folder / "keys.toml"
    before = path.read_text(encoding="utf-8")
    if f"[keys.{name}]" in before.splitlines():
        raise SettingsError(f"there is a key {name!r} in {path}: choose another name")
    _show_key(name, folder, before + "\n", operator=operator)


def make_bucket(url: str | None) -> None:
    """
    Make the bucket at an endpoint of one's own; a folder needs none, and in a cloud its owner makes it.

    Raises:
        SettingsError: the URL is none of a store, or the server makes no bucket.
        ObjectStoreError: it takes no objects.
    """
    import boto3
    from botocore.exceptions import ClientError

    store = open_store(url) if url else None
    endpoint = dict(parse_qsl(urlsplit(url or "").query)).get("endpoint")
    if not isinstance(store, S3Store) or not endpoint:
        print(f"{store}: nothing to make")
        return
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    try:
        client.create_bucket(Bucket=store.bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
            raise SettingsError(f"the bucket {store.bucket} cannot be made at {endpoint}: {error}") from error
    _await_writes(store)
    print(f"the bucket {store.bucket} is there")


def _await_writes(store: S3Store) -> None:
    """A server may have buckets for seconds before it has a place for objects."""
    deadline = time.monotonic() + WRITES_S
    while True:
        try:
            store.delete(store.put("ready", b"yes"))
            return
        except ObjectStoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def _show_key(name: str, folder: Path, before: str, *, operator: bool = False) -> None:
    key = new_key()
    _write(folder / "keys.toml", before + entry(name, key, operator=operator) + "\n")
    KeyRing(folder / "keys.toml")
    print(f"API key {name}, shown this once: {key}", flush=True)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and never readable to others."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "w", encoding="utf-8") as file:
        file.write(text)
    scratch.chmod(MODE)
    scratch.replace(path)


def _credentials(access: str, secret: str) -> str:
    return f"[default]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n"


def _identities(access: str, secret: str) -> str:
    identity = {"name": "pagemill", "credentials": [{"accessKey": access, "secretKey": secret}], "actions": ACTIONS}
    return json.dumps({"identities": [identity]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/secrets"), help="where secrets are (default: /secrets)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("secrets")
    key = verbs.add_parser("key")
    key.add_argument("name")
    key.add_argument("--operator", action="store_true", help="it may look at the status page, of all tenants")
    verbs.add_parser("bucket")
    given = parser.parse_args()
    try:
        if given.verb == "secrets":
            make_secrets(given.folder)
        elif given.verb == "key":
            add_key(given.folder, given.name, operator=given.operator)
        else:
            make_bucket(ClientSettings.load(strict=False).object_store)
    except PagemillError as error:
        print(f"first_start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
