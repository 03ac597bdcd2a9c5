"""The S3 client: the one door to stored objects, for api, worker and ticker.

It promises that `put` returns only after the store showed the right size and digest, that a failed multipart
upload leaves no parts behind, and that presigned links are signed for the public endpoint. Keys are relative
to `S3_PREFIX` and are made only by `input_key` and `output_key`; no name that a client chose is ever part of
one. Calls block: run them in a thread where an event loop turns. Rows and retention are not its business.
"""

import functools
import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from farm.clock import now
from farm.errors import FarmError
from farm.metrics.families import STORAGE_ERRORS
from farm.settings import Settings

MIB = 1024 * 1024
SINGLE_PUT_MAX_BYTES = 64 * MIB
PART_BYTES = 16 * MIB
READ_BYTES = MIB
RETRY_AFTER_S = 5
SHA256_METADATA = "sha256"
OBJECTS = "v1/"  # all keys begin so
CLOCK_WARN_S = 30.0
CLOCK_REFUSE_S = 300.0
_SESSION_LOCK = threading.Lock()
_SAFE_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class StorageError(FarmError):
    """The object store did not answer, or not as it must."""

    def __init__(self, message: str = "the object store is not reachable; try again later") -> None:
        """Take a sentence that names no host, bucket or key."""
        super().__init__("no_storage", 503, message, retry_after_s=RETRY_AFTER_S)


class ObjectMissingError(StorageError):
    """The store has no object under this key."""


class DigestMismatchError(StorageError):
    """What the store holds is not what was sent."""


@dataclass(frozen=True)
class StoredObject:
    """One object as the store shows it; `sha256` is None where it was not written by `put`."""

    key: str
    bytes: int
    sha256: str | None


class ObjectBody(Protocol):
    """The bytes of one object or range, read in pieces; the caller closes it."""

    def read(self, amt: int | None = None) -> "bytes":
        """Return up to `amt` bytes, empty at the end."""

    def close(self) -> None:
        """Give the connection back."""


def input_key(account_id: str, sha256: str) -> str:
    """Return the key of a normalised input image, content-addressed within its account."""
    return f"v1/{account_id}/in/{sha256}.png"


def output_key(account_id: str, job_id: str, epoch: int, name: str, at: datetime) -> str:
    """Return the key of one output of one attempt; the epoch in it keeps a stale worker's upload apart."""
    return f"v1/{account_id}/out/{at:%Y/%m/%d}/{job_id}/e{epoch}/{name}"


def sha256_of(source: "Path | bytes") -> str:
    """Digest a file or bytes without holding the file in memory."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ObjectStore:
    """Put, get and link objects of one bucket."""

    def __init__(self, settings: Settings) -> None:
        """Build the clients; nothing is contacted yet."""
        self._settings = settings
        self._bucket = settings.s3_bucket
        self._prefix = f"{settings.s3_prefix.strip('/')}/" if settings.s3_prefix.strip("/") else ""
        self._client = _make_client(settings, settings.s3_endpoint_url)
        # Probes answer health checks: they fail fast and do not retry.
        self._probe = _make_client(settings, settings.s3_endpoint_url, probe=True)
        public_url = settings.s3_public_endpoint_url
        self._signer = _make_client(settings, public_url) if public_url else self._client

    def put(self, key: str, source: "Path | bytes", media_type: str) -> StoredObject:
        """Upload, then ask the store for size and digest; overwrites.

        Raises:
            StorageError: The store failed; multipart uploads were aborted.
            DigestMismatchError: The store shows other bytes than were sent.
        """
        digest = sha256_of(source)
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        where = self._where(key) | {"ContentType": media_type, "Metadata": {SHA256_METADATA: digest}}
        with _typed_errors():
            if isinstance(source, bytes):
                self._client.put_object(Body=source, **where)
            else:
                with source.open("rb") as file:
                    self._put_file(file, size, where)
        stored = self.head(key)
        if stored.bytes != size or stored.sha256 != digest:
            raise DigestMismatchError("the object store does not show the bytes that were sent")
        return stored

    def get_to_file(self, key: str, path: Path) -> StoredObject:
        """Download to a file and check size and digest; a file that fails the check is removed."""
        digest = hashlib.sha256()
        with _typed_errors():
            answer = self._client.get_object(**self._where(key))
            expected = answer["Metadata"].get(SHA256_METADATA)
            with answer["Body"] as body, path.open("wb") as file:
                for chunk in iter(lambda: body.read(READ_BYTES), b""):
                    digest.update(chunk)
                    file.write(chunk)
        size = path.stat().st_size
        if size != answer["ContentLength"] or (expected is not None and expected != digest.hexdigest()):
            path.unlink()
            raise DigestMismatchError("the stored object does not match its digest")
        return StoredObject(key, size, digest.hexdigest())

    def open_range(self, key: str, start: int = 0, end: int | None = None) -> ObjectBody:
        """Open the bytes from `start` to `end`, both included; None means to the end."""
        wanted = (
            {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end}"}
        )
        with _typed_errors():
            body: ObjectBody = self._client.get_object(**self._where(key), **wanted)["Body"]
        return body

    def head(self, key: str) -> StoredObject:
        """Return what the store says about an object.

        Raises:
            ObjectMissingError: There is none.
        """
        with _typed_errors():
            answer = self._client.head_object(**self._where(key))
        return StoredObject(key, answer["ContentLength"], answer["Metadata"].get(SHA256_METADATA))

    def delete(self, key: str) -> None:
        """Remove an object; one that is gone already counts as removed."""
        with _typed_errors():
            self._client.delete_object(**self._where(key))

    def list_keys(self) -> Iterator[str]:
        """Return the keys of all objects below the prefix, a page at a time."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}{OBJECTS}"
        )
        with _typed_errors():
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield str(entry["Key"]).removeprefix(self._prefix)

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Give up uploads in parts that were begun so long ago; return how many."""
        where = {"Bucket": self._bucket, "Prefix": self._prefix}
        num_aborted = 0
        with _typed_errors():
            pages = self._client.get_paginator("list_multipart_uploads").paginate(**where)
            for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
                if (now() - upload["Initiated"]).total_seconds() > older_than_s:
                    target = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self._client.abort_multipart_upload(Bucket=self._bucket, **target)
                    num_aborted += 1
        return num_aborted

    def presign(self, key: str, ttl_s: int, filename: str, media_type: str) -> str:
        """Return a link for `ttl_s` seconds, signed for the public endpoint; downloads as `filename`."""
        params = self._where(key) | {
            "ResponseContentDisposition": content_disposition(filename),
            "ResponseContentType": media_type,
        }
        with _typed_errors():
            url: str = self._signer.generate_presigned_url("get_object", Params=params, ExpiresIn=ttl_s)
        return url

    def ensure_bucket(self) -> list[str]:
        """Make the bucket if it is missing and set its lifecycle; return what the store does not support."""
        with _typed_errors():
            if not self._has_bucket():
                self._client.create_bucket(Bucket=self._bucket)
        rules = _lifecycle_rules(self._prefix, self._settings)
        try:
            self._client.put_bucket_lifecycle_configuration(
                Bucket=self._bucket, LifecycleConfiguration={"Rules": rules}
            )
        except (ClientError, BotoCoreError) as exc:
            return [f"lifecycle rules refused ({_code_of(exc)}): the ticker alone removes old objects"]
        return []

    def check(self) -> None:
        """Raise StorageError unless the bucket answers within a few seconds."""
        with _typed_errors():
            self._probe.head_bucket(Bucket=self._bucket)

    def clock_offset_s(self) -> float:
        """Return the store's clock minus ours; signatures fail when they are far apart."""
        with _typed_errors():
            before = now()
            answer = self._probe.head_bucket(Bucket=self._bucket)
            after = now()
        date: datetime = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return (date - (before + (after - before) / 2)).total_seconds()

    def _where(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _has_bucket(self) -> bool:
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except ClientError as exc:
            if _code_of(exc) in {"404", "NoSuchBucket"}:
                return False
            raise
        return True

    def _put_file(self, file: BinaryIO, size: int, where: dict[str, Any]) -> None:
        if size <= SINGLE_PUT_MAX_BYTES:
            self._client.put_object(Body=file, **where)
            return
        upload = self._client.create_multipart_upload(**where)
        target = {"Bucket": where["Bucket"], "Key": where["Key"], "UploadId": upload["UploadId"]}
        try:
            parts = []
            for number, chunk in enumerate(iter(lambda: file.read(PART_BYTES), b""), start=1):
                tag = self._client.upload_part(Body=chunk, PartNumber=number, **target)["ETag"]
                parts.append({"PartNumber": number, "ETag": tag})
            self._client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **target)
        except BaseException:
            self._client.abort_multipart_upload(**target)
            raise


def content_disposition(filename: str) -> str:
    """Return a header value that offers a download; anything but plain letters and digits becomes a dash."""
    return f'attachment; filename="{_SAFE_NAME.sub("-", filename).strip("-") or "download"}"'


def _make_client(settings: Settings, endpoint_url: str | None, *, probe: bool = False) -> Any:
    secret, token = settings.aws_secret_access_key, settings.aws_session_token
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": settings.s3_addressing},
        # The newer default sends trailing checksums, which several S3 look-alikes store as part of the
        # object.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"mode": "standard", "max_attempts": 0 if probe else 5},
        connect_timeout=2 if probe else 5,
        read_timeout=3 if probe else 60,
        max_pool_connections=32,
    )
    with _SESSION_LOCK:  # clients may be shared by threads, making them may not
        return _session().client(
            "s3",
            endpoint_url=endpoint_url,
            region_name=settings.s3_region,
            aws_access_key_id=settings.aws_access_key_id,
            aws_secret_access_key=secret.get_secret_value() if secret else None,
            aws_session_token=token.get_secret_value() if token else None,
            config=config,
        )


@functools.cache
def _session() -> boto3.session.Session:
    """Return the one session of the process; it keeps the parsed service description, which is slow."""
    return boto3.session.Session()


def _lifecycle_rules(prefix: str, settings: Settings) -> list[dict[str, Any]]:
    # S3 rules match a prefix, and the account stands before `in/` and `out/`, so the rule covers both. That
    # is safe: inputs are written anew by every submit that names them, and a job's row does not outlive this
    # many days.
    days = settings.retention.longest_days + 7
    match = {"Prefix": f"{prefix}v1/"}
    return [
        {
            "ID": "magi2-backstop",
            "Status": "Enabled",
            "Filter": match,
            "Expiration": {"Days": days},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        }
    ]


def _code_of(exc: Exception) -> str:
    return str(exc.response["Error"]["Code"]) if isinstance(exc, ClientError) else type(exc).__name__


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Re-type the library's errors; its texts name hosts and keys, so they stay in the cause."""
    try:
        yield
    except ClientError as exc:
        if _code_of(exc) in {"404", "NoSuchKey"}:
            raise ObjectMissingError("the object is not in the store") from exc
        STORAGE_ERRORS.inc()
        raise StorageError from exc
    except BotoCoreError as exc:
        STORAGE_ERRORS.inc()
        raise StorageError from exc
