"""Ask an S3-compatible store: with credentials that are made anew, and errors that are ours."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from pagemill.errors import ObjectChanged, ObjectExists, ObjectNotFound, ObjectStoreError, StoreAway

_MISSING = frozenset({"NoSuchKey", "NoSuchBucket", "404", "NotFound"})

# what a store says, besides statuses from 500 on, when it has too much to do
_OVERLOADED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"})

# what it says to a request that was signed too long ago, or by who is nobody any more
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestTimeTooSkewed"})

_PRECONDITION = frozenset({"PreconditionFailed", "412"})

# one conditional write met another; whoever lost must ask again
_CONFLICT = frozenset({"ConditionalRequestConflict", "409"})
_MAX_CONFLICTS = 5


class S3Calls:
    """
    Sends requests to one store; thread-safe. The client retries what is throttled, refused in passing, or out of reach.

    Args:
        endpoint: Of a store that is not AWS.
    """

    def __init__(self, endpoint: str | None = None, region: str | None = None) -> None:
        self._endpoint = endpoint
        self._region = region
        self._lock = threading.Lock()
        self._made: Any = None

    def send(self, operation: str, **arguments: Any) -> Any:
        """
        Send one request; where the credentials had expired, once more with new ones.

        Raises:
            ClientError: of botocore, as all that `errors` translates.
        """
        from botocore.exceptions import ClientError

        client = self._client()
        try:
            return getattr(client, operation)(**arguments)
        except ClientError as error:
            if error_code(error) not in _EXPIRED:
                raise
        return getattr(self._client(instead_of=client), operation)(**arguments)

    def send_if_absent(self, operation: str, **arguments: Any) -> Any:
        """
        Send a write that must not find an object; again where it met another one that came to nothing.

        Raises:
            ObjectExists: there is an object. It may be ours, where the answer to our write was lost.
        """
        from botocore.exceptions import ClientError

        for attempt in range(_MAX_CONFLICTS):
            try:
                return self.send(operation, **arguments, IfNoneMatch="*")
            except ClientError as error:
                if error_code(error) in _PRECONDITION:
                    raise ObjectExists(f"there is an object {arguments['Key']!r} already") from error
                if error_code(error) not in _CONFLICT or attempt == _MAX_CONFLICTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _client(self, instead_of: Any = None) -> Any:
        with self._lock:
            if self._made is None or self._made is instead_of:
                self._made = _s3_client(self._endpoint, self._region)
            return self._made


def error_code(error: Any) -> str:
    """What the store calls the error."""
    return str(error.response.get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def s3_errors(action: str) -> Iterator[None]:
    """Raise errors of the S3 client as ObjectStoreError of the right kind."""
    from botocore import exceptions as errors

    try:
        yield
    except errors.ClientError as error:
        raise _kind_of_answer(error)(f"cannot {action}: {error}") from error
    except out_of_reach() as error:
        raise StoreAway(f"cannot {action}: {error}") from error
    except errors.BotoCoreError as error:
        # no credentials, a setting that is wrong
        raise ObjectStoreError(f"cannot {action}: {error}") from error


def out_of_reach() -> tuple[type[Exception], ...]:
    """What the S3 client raises when a connection fails, or breaks off in the middle of an object."""
    from botocore import exceptions as errors

    return (errors.ConnectionError, errors.HTTPClientError, errors.IncompleteReadError, OSError)


def _kind_of_answer(error: Any) -> type[ObjectStoreError]:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = error_code(error)
    if code in _MISSING:
        return ObjectNotFound
    if code in _PRECONDITION:
        return ObjectChanged
    return StoreAway if status >= 500 or code in _OVERLOADED or code in _CONFLICT else ObjectStoreError


def _s3_client(endpoint: str | None, region: str | None) -> Any:
    # 80 ms of imports that a store in a folder need not pay
    import boto3
    from botocore.config import Config

    options: dict[str, Any] = {}
    if endpoint:
        options["s3"] = {"addressing_style": "path"}
        # boto3's checksum trailers break many stores that are not AWS (boto3#4392)
        options["request_checksum_calculation"] = "when_required"
        options["response_checksum_validation"] = "when_required"
    config = Config(
        retries={"mode": "adaptive", "max_attempts": 10},
        max_pool_connections=32,
        connect_timeout=5,
        read_timeout=60,
        tcp_keepalive=True,
        **options,
    )
    # a session of our own: the default one is not safe to make clients from in threads, and it would keep
    # credentials that have expired
    return boto3.session.Session().client("s3", endpoint_url=endpoint, region_name=region, config=config)
