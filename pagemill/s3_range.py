"""Read a window of one object of a bucket, and go on where a read breaks off."""

from pagemill.errors import ObjectStoreError
from pagemill.s3_calls import S3Calls, error_code, out_of_reach

# a read may break off so often in a row without a single byte more
_MAX_BARREN = 5

_PIECE_BYTES = 1024 * 1024


class S3Range:
    """
    One window: what has come of it, and of which object.

    The S3 client retries requests and not bodies. What is read after a break is asked for with the etag of what came
    before it, so that the window is never of two objects.
    """

    def __init__(self, calls: S3Calls, place: dict[str, str], start: int, length: int, etag: str | None) -> None:
        self._calls = calls
        self._place = place
        self._start = start
        self._length = length
        self._etag = etag
        self._data = bytearray()

    def read(self) -> bytes:
        """
        All of the window that there is.

        Raises:
            Exception: of the S3 client, as `s3_errors` translates.
        """
        num_barren = 0
        while self._length > len(self._data):
            num_before = len(self._data)
            try:
                self._read_on()
                break
            except out_of_reach():
                num_barren = 0 if len(self._data) > num_before else num_barren + 1
                if self._etag is None or num_barren == _MAX_BARREN:
                    raise
        return bytes(self._data)

    def _read_on(self) -> None:
        from botocore.exceptions import ClientError

        first, last = self._start + len(self._data), self._start + self._length - 1
        condition = {"IfMatch": self._etag} if self._etag is not None else {}
        try:
            answer = self._calls.send("get_object", **self._place, **condition, Range=f"bytes={first}-{last}")
        except ClientError as error:
            # nothing lies behind the object's end
            if error_code(error) in ("InvalidRange", "416"):
                return
            raise
        if first and not str(answer.get("ContentRange", "")).startswith(f"bytes {first}-"):
            raise ObjectStoreError(
                f"the store takes no ranges: it was asked for {self._place['Key']} from byte {first:,}"
            )
        self._etag = self._etag or answer.get("ETag")
        body = answer["Body"]
        # a store that takes no ranges sends more than was asked for
        while (left := self._length - len(self._data)) and (piece := body.read(min(left, _PIECE_BYTES))):
            self._data += piece
