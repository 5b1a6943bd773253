"""Write one large object of a bucket in parts, each of which is retried alone."""

import contextlib
from typing import Any, Self

from pagemill.errors import ObjectStoreError
from pagemill.s3_calls import S3Calls, error_code, s3_errors

# what is held in memory; S3 takes 10,000 parts, so that an object may have 78 GiB
PART_BYTES = 8 * 1024 * 1024
MAX_PARTS = 10_000


class S3Writer:
    """
    Sends parts as they fill, and makes an object of them when it is left in order.

    An object of one part is sent as it is. Parts of an object that comes to nothing are taken back; what a crash
    leaves is for a lifecycle rule of the bucket that ends unfinished uploads.

    Args:
        if_absent: Leaving raises ObjectExists if there is such an object by then.
    """

    def __init__(self, calls: S3Calls, bucket: str, key: str, url: str, *, if_absent: bool) -> None:
        self.url = url
        self._calls = calls
        self._place = {"Bucket": bucket, "Key": key}
        self._send_whole = calls.send_if_absent if if_absent else calls.send
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data)
        for start in range(0, len(view), PART_BYTES):
            self._buffer += view[start : start + PART_BYTES]
            if len(self._buffer) >= PART_BYTES:
                self._send_part(PART_BYTES)
        return len(view)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                with s3_errors(f"write {self.url}"):
                    self._finish()
                self._upload_id = None
        finally:
            self._buffer.clear()
            if self._upload_id is not None:
                # the first error says what happened; a rule of the bucket may take the parts back later
                with contextlib.suppress(ObjectStoreError), s3_errors(f"take back {self.url}"):
                    self._calls.send("abort_multipart_upload", **self._place, UploadId=self._upload_id)

    def _send_part(self, num_bytes: int) -> None:
        if len(self._parts) == MAX_PARTS:
            raise ObjectStoreError(f"{self.url} has more than {MAX_PARTS:,} parts of {PART_BYTES:,} bytes: write less")
        with s3_errors(f"write {self.url}"):
            if self._upload_id is None:
                self._upload_id = self._calls.send("create_multipart_upload", **self._place)["UploadId"]
            number = len(self._parts) + 1
            part = bytes(self._buffer[:num_bytes])
            del self._buffer[:num_bytes]
            answer = self._calls.send(
                "upload_part", **self._place, UploadId=self._upload_id, PartNumber=number, Body=part
            )
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        checksums.pop("ChecksumType", None)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"], **checksums})
        self._size += num_bytes

    def _finish(self) -> None:
        if self._upload_id is None:
            self._send_whole("put_object", **self._place, Body=bytes(self._buffer))
            return
        if self._buffer:
            self._send_part(len(self._buffer))
        # known only once there is something to send: its import takes 80 ms
        from botocore.exceptions import ClientError

        parts = {"Parts": self._parts}
        try:
            self._send_whole(
                "complete_multipart_upload", **self._place, UploadId=self._upload_id, MultipartUpload=parts
            )
        except ClientError as error:
            if error_code(error) != "NoSuchUpload" or not self._is_there():
                raise

    def _is_there(self) -> bool:
        """Whether the object was made after all, by a request whose answer was lost."""
        found = self._calls.send("head_object", **self._place)
        return bool(
            found["ContentLength"] == self._size and str(found["ETag"]).strip('"').endswith(f"-{len(self._parts)}")
        )
