"""The object store client against SeaweedFS, and against a store that fails in the middle."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from farm import storage
from farm.settings import Settings
from farm.storage import DigestMismatchError, ObjectMissingError, ObjectStore, StorageError, StoredObject

DATA = bytes(range(256)) * 100
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 takes no parts under 5 MiB but the last; files of this test have 12 MiB."""
    monkeypatch.setattr(storage, "SINGLE_PUT_MAX_BYTES", 1 << 20)
    monkeypatch.setattr(storage, "PART_BYTES", 5 << 20)


@pytest.fixture
def big_file(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(bytes(range(256)) * (12 << 12))
    return path


def test_bytes_come_back_with_size_and_digest(object_store: ObjectStore, tmp_path: Path) -> None:
    put = object_store.put("v1/a", DATA, "video/mp4")
    got = object_store.get_to_file("v1/a", tmp_path / "a")
    assert put == got == object_store.head("v1/a") == StoredObject("v1/a", len(DATA), DIGEST)
    assert (tmp_path / "a").read_bytes() == DATA


@pytest.mark.usefixtures("small_parts")
def test_file_over_the_limit_goes_up_in_parts(
    object_store: ObjectStore, big_file: Path, tmp_path: Path
) -> None:
    put = object_store.put("v1/big", big_file, "video/mp4")
    assert put.bytes == big_file.stat().st_size
    assert object_store.get_to_file("v1/big", tmp_path / "copy").sha256 == put.sha256


def open_uploads(store: ObjectStore) -> list[object]:
    return store._client.list_multipart_uploads(Bucket=store._bucket).get("Uploads", [])


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("error", [EndpointConnectionError(endpoint_url="x"), KeyboardInterrupt()])
def test_upload_that_fails_in_the_middle_leaves_no_parts(
    object_store: ObjectStore,
    big_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    real = object_store._client.upload_part
    seen: list[int] = []

    def failing(**arguments: object) -> object:
        seen.append(len(open_uploads(object_store)))
        if arguments["PartNumber"] == 2:
            raise error
        return real(**arguments)

    monkeypatch.setattr(object_store._client, "upload_part", failing)
    with pytest.raises((StorageError, KeyboardInterrupt)):
        object_store.put("v1/big", big_file, "video/mp4")
    assert seen == [1, 1]
    assert open_uploads(object_store) == []
    with pytest.raises(ObjectMissingError):
        object_store.head("v1/big")


@pytest.mark.parametrize(
    ("start", "end", "wanted"),
    [(0, None, DATA), (0, 0, DATA[:1]), (10, 19, DATA[10:20]), (25_590, None, DATA[25_590:])],
)
def test_ranges_are_read(object_store: ObjectStore, start: int, end: int | None, wanted: bytes) -> None:
    object_store.put("v1/a", DATA, "video/mp4")
    body = object_store.open_range("v1/a", start, end)
    assert body.read() == wanted
    body.close()


def test_missing_objects_are_told_apart_from_a_missing_store(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    for call in (
        lambda: object_store.head("v1/none"),
        lambda: object_store.open_range("v1/none"),
        lambda: object_store.get_to_file("v1/none", tmp_path / "none"),
    ):
        with pytest.raises(ObjectMissingError):
            call()


def test_delete_counts_an_object_that_is_gone_as_removed(object_store: ObjectStore) -> None:
    object_store.put("v1/a", DATA, "video/mp4")
    for _ in range(2):
        object_store.delete("v1/a")
    with pytest.raises(ObjectMissingError):
        object_store.head("v1/a")


def test_wrong_digest_is_noticed_on_the_way_up_and_down(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    monkeypatch.setattr(storage, "sha256_of", lambda _: other)
    monkeypatch.setattr(ObjectStore, "head", lambda _, key: StoredObject(key, len(DATA), DIGEST))
    with pytest.raises(DigestMismatchError):
        object_store.put("v1/a", DATA, "video/mp4")
    with pytest.raises(DigestMismatchError):
        object_store.get_to_file("v1/a", tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.req("F-21")
def test_link_sets_name_and_type_and_ends(object_store: ObjectStore) -> None:
    object_store.put("v1/a", DATA, "application/octet-stream")
    link = object_store.presign("v1/a", 60, 'a"\r\nX: y.mp4', "video/mp4")
    answer = httpx.get(link)
    assert answer.content == DATA
    assert answer.headers["content-disposition"] == 'attachment; filename="a-X-y.mp4"'
    assert answer.headers["content-type"] == "video/mp4"
    assert httpx.get(link.replace("X-Amz-Expires=60", "X-Amz-Expires=61")).status_code == 403


def test_keys_lie_below_the_prefix(object_store: ObjectStore, settings: Settings) -> None:
    object_store.put("v1/a", DATA, "video/mp4")
    listed = object_store._client.list_objects_v2(
        Bucket=settings.s3_bucket, Prefix=f"{settings.s3_prefix}/v1/"
    )
    assert [entry["Key"] for entry in listed["Contents"]] == [f"{settings.s3_prefix}/v1/a"]


def test_bucket_is_made_once_with_its_lifecycle(settings: Settings) -> None:
    store = ObjectStore(settings.model_copy(update={"s3_bucket": f"made-{settings.s3_prefix}"}))
    with pytest.raises(StorageError):
        store.check()
    assert [store.ensure_bucket(), store.ensure_bucket()] == [[], []]
    store.check()
    (rule,) = store._client.get_bucket_lifecycle_configuration(Bucket=store._bucket)["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert rule["Expiration"] == {"Days": 97}


def test_store_without_lifecycle_is_told_not_refused(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(**_: object) -> None:
        raise ClientError({"Error": {"Code": "NotImplemented"}}, "PutBucketLifecycleConfiguration")

    monkeypatch.setattr(object_store._client, "put_bucket_lifecycle_configuration", unsupported)
    (sentence,) = object_store.ensure_bucket()
    assert "NotImplemented" in sentence


@pytest.mark.req("F-21")
def test_clocks_of_one_machine_agree(object_store: ObjectStore) -> None:
    assert abs(object_store.clock_offset_s()) < 3


def test_store_that_is_away_is_one_typed_error_without_its_address(settings: Settings) -> None:
    store = ObjectStore(settings.model_copy(update={"s3_endpoint_url": "http://127.0.0.1:1"}))
    with pytest.raises(StorageError) as caught:
        store.check()
    assert (caught.value.code, caught.value.http_status) == ("no_storage", 503)
    assert "127.0.0.1" not in caught.value.message


@pytest.fixture
def flaky(settings: Settings) -> Iterator[Callable[[int], ObjectStore]]:
    """Return a store whose first answers are 503, and which then takes one PUT."""
    servers: list[ThreadingHTTPServer] = []

    def start(num_failures: int) -> ObjectStore:
        left = [num_failures]

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                left[0] -= 1
                self.send_response(503 if left[0] >= 0 else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_HEAD(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(DATA)))
                self.send_header("x-amz-meta-sha256", DIGEST)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever).start()
        servers.append(server)
        url = f"http://127.0.0.1:{server.server_address[1]}"
        return ObjectStore(settings.model_copy(update={"s3_endpoint_url": url}))

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_short_outage_is_bridged_by_retries(flaky: Callable[[int], ObjectStore]) -> None:
    assert flaky(2).put("v1/a", DATA, "video/mp4").sha256 == DIGEST
