"""A real S3-compatible server, as a child process on free ports."""

import json
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest

from producers.child import Child
from tests.support.servers import wait_for

ACCESS_KEY, SECRET_KEY = "test-key", "test-secret"

# of the same user, with the same secret: one to expire
OLD_KEY = "old-key"
BUCKET = "bulk"

# master, volume server, filer and S3 gateway, each with HTTP and gRPC
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")


class Seaweed:
    """
    SeaweedFS with one bucket; entered, it serves. It asks no other machine for anything.

    Args:
        folder: Where it keeps its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self.endpoint = ""

    def url(self, path: str, endpoint: str | None = None) -> str:
        """A place in the bucket, as a store or a source takes it; `endpoint` is a proxy's before the server."""
        return f"s3://{BUCKET}/{path}?region=us-east-1&endpoint={endpoint or self.endpoint}"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        keys = [{"accessKey": key, "secretKey": SECRET_KEY} for key in (ACCESS_KEY, OLD_KEY)]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": [{"name": "tests", "credentials": keys, "actions": actions}]}))
        names = [name for base in _PORTS for name in (base, f"{base}.grpc")]
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        options = {"dir": self._folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.config": config, **ports}
        options |= {"master.telemetry": "false", "master.volumeSizeLimitMB": 64, "volume.max": 20}
        options |= {
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "volume.preStopSeconds": 0,
            "master.electionTimeout": "1s",
        }
        weed = Path(sys.executable).with_name("weed")
        command = [
            str(weed),
            "-logtostderr=true",
            "server",
            "-s3",
            *(f"-{key}={value}" for key, value in options.items()),
        ]
        # nothing that it keeps is wanted any more when it ends
        child = self._stack.enter_context(Child(command, log=self._folder / "server.log", grace_s=0.2))

        def serves() -> bool:
            assert child.exit_code() is None, child.last_lines()
            # the gateway takes buckets before there is a volume server to write to
            with suppress(Exception):
                self.client().create_bucket(Bucket=BUCKET)
            with suppress(Exception):
                self.client().put_object(Bucket=BUCKET, Key="ready", Body=b"1")
                return True
            return False

        wait_for(serves, 40)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def lend_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put them where stores look for them."""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        # not `sleep` of the module itself: all of this process would wait no longer
        monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(time=time.time, sleep=lambda _: None))

    def client(self) -> Any:
        """A plain S3 client that asks once, to look at what is there."""
        import boto3
        from botocore.config import Config

        config = Config(retries={"max_attempts": 0}, connect_timeout=2, read_timeout=5, s3={"addressing_style": "path"})
        session = boto3.session.Session(ACCESS_KEY, SECRET_KEY, region_name="us-east-1")
        return session.client("s3", endpoint_url=self.endpoint, config=config)


def free_ports(number: int) -> list[int]:
    """Ports that nobody has, all of them held until the last is found."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
