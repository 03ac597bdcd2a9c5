"""The embedded object store: SeaweedFS in its one-process `mini` form, S3 on a loopback port.

Telemetry and the listening on all interfaces, both on by default, are switched off. Ready means that a put
and a get succeeded: the port answers earlier than the store.
"""

import contextlib
import signal
from collections.abc import Mapping
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from farm.embedded.binaries import WEED, find_program
from farm.embedded.ports import LOOPBACK, free_ports
from farm.embedded.process import Child, ChildSpec

READY_TIMEOUT_S = 40.0
REGION = "us-east-1"
_PROBE_KEY = ".ready"


class SeaweedServer:
    """A running SeaweedFS with one bucket and one key pair."""

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        *,
        access_key: str,
        secret_key: str,
        bucket: str,
    ) -> None:
        """Start it with its data in a folder; it answers after `wait_ready`."""
        data = directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        self.access_key, self.secret_key, self.bucket = access_key, secret_key, bucket
        self.port, master, volume, filer, admin = free_ports(5)
        # fmt: off
        command = [
            str(find_program(WEED, environment)), "-logtostderr=true", "mini", f"-dir={data}",
            f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}", "-master.telemetry=false", "-webdav=false",
            "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
            f"-bucket={bucket}", f"-s3.port={self.port}", f"-master.port={master}", f"-volume.port={volume}",
            f"-filer.port={filer}", f"-admin.port={admin}",
        ]
        # fmt: on
        keys = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
        self.child = Child(
            ChildSpec("seaweedfs", command, directory, directory / "seaweedfs.log", {**environment, **keys})
        )
        self._client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                connect_timeout=1,
                read_timeout=2,
                retries={"total_max_attempts": 1},
            ),
        )

    def wait_ready(self) -> None:
        """Wait until a put and a get succeed."""
        self.child.wait_ready(self._stores, timeout_s=READY_TIMEOUT_S)
        self._client.delete_object(Bucket=self.bucket, Key=_PROBE_KEY)

    @property
    def url(self) -> str:
        """Endpoint URL of the S3 API."""
        return f"http://{LOOPBACK}:{self.port}"

    def ask_to_end(self) -> None:
        """Send SIGTERM and do not wait."""
        self.child.send(signal.SIGTERM)

    def stop(self, *, timeout_s: float = 2.5) -> None:
        """End it; it takes 2 s by itself, nearly all of it waiting."""
        self.child.stop(signal.SIGTERM, timeout_s=timeout_s)

    def _stores(self) -> bool:
        with contextlib.suppress(BotoCoreError, ClientError):
            self._client.put_object(Bucket=self.bucket, Key=_PROBE_KEY, Body=b"ready")
            answer = self._client.get_object(Bucket=self.bucket, Key=_PROBE_KEY)
            return bytes(answer["Body"].read()) == b"ready"
        return False
