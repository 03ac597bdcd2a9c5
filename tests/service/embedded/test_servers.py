"""The embedded servers: real, on loopback only, stoppable, and usable again after a killed starter."""

import psycopg
import redis

from farm.embedded.servers import EmbeddedServers
from tests.service.conftest import S3Place


def test_every_server_answers(servers: EmbeddedServers, s3: S3Place) -> None:
    with psycopg.connect(servers.postgres.url) as connection:
        assert connection.execute("SHOW server_version_num").fetchone()[0] >= "150000"
    with redis.Redis.from_url(servers.valkey.url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    client = s3.client()
    client.put_object(Bucket=s3.bucket, Key=f"{s3.prefix}/x", Body=b"abc")
    assert client.get_object(Bucket=s3.bucket, Key=f"{s3.prefix}/x")["Body"].read() == b"abc"
