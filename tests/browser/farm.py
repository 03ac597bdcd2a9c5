"""A farm that has lived: accounts, groups, jobs in every state, a clip that plays, webhooks that fail.

Everything is made by the farm's own functions, as api and worker would; only time is moved by hand.
"""

import io
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import av
import numpy as np
import sqlalchemy
from PIL import Image
from sqlalchemy import insert, select, text

from farm import admins, audit
from farm.accounts import create_key, ensure_account
from farm.admins import Role
from farm.clock import now
from farm.db.session import unit_of_work
from farm.db.tables import job
from farm.groups import Group, Wish, heartbeat, register, set_wanted_state
from farm.jobs.claim import claim
from farm.jobs.control import quarantine_job, request_cancel
from farm.jobs.job import Claimed, NewAsset
from farm.jobs.lifecycle import Result, beat, fail, mark_running, mark_uploading, succeed
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.states import State
from farm.jobs.submit import Submission, submit
from farm.profile_control import pause_profile
from farm.secretbox import seal
from farm.settings import Settings
from farm.storage import ObjectStore, output_key
from farm.webhooks.endpoints import NewEndpoint, create_endpoint
from magi2.contract import CONTRACT_VERSION, GenerationRequest

PROFILE = "tiny-cpu"
PASSWORD = "correct horse battery"
MARKUP = (
    '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script> a <b>red</b> fox'
)
LONG = "A lighthouse in a storm at night, waves breaking over black rocks. " * 40 + "Unbreakable" * 30


def clip_bytes() -> bytes:
    """Make a short mp4 with sound that a browser plays."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        video = container.add_stream("libx264", rate=25)
        video.width, video.height, video.pix_fmt = 448, 256, "yuv420p"
        sound = container.add_stream("aac", rate=44_100, layout="stereo")
        for index in range(50):
            shade = np.full((256, 448, 3), (index * 4, 90, 200 - index * 3), np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(shade)))
        wave = np.zeros((2, 1024), np.float32)
        for index in range(86):
            frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout="stereo")
            frame.sample_rate, frame.pts = 44_100, index * 1024
            container.mux(sound.encode(frame))
        container.mux(video.encode())
        container.mux(sound.encode())
    return buffer.getvalue()


def stats_of(state: str) -> dict[str, Any]:
    """Return what an agent says of four devices (`worker/health.py`)."""
    problem = "device 3: 2 uncorrectable memory errors" if state == "sick" else ""
    devices = [
        {
            "index": index,
            "name": "NVIDIA H200",
            "memory_used_bytes": (30 + 35 * index) << 30,
            "memory_total_bytes": 141 << 30,
            "utilization_percent": 97 if state == "busy" else 0,
            "temperature_c": 61,
            "throttling": ["sw_thermal"] if index == 2 else [],
            "problem": problem if index == 3 else "",
        }
        for index in range(4)
    ]
    return {"devices": devices, "problem": problem, "utilization_1h": 71.5, "busy_1h": 0.83, "restarts": 2}


def jpeg_bytes() -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((448, 256)).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


@dataclass
class LivedFarm:
    """The rows, and what a worker or the clock would do to them."""

    settings: Settings
    database: sqlalchemy.Engine
    store: ObjectStore
    account_id: str = ""

    def login(self, name: str, role: Role = Role.ADMIN) -> None:
        with unit_of_work(self.database) as conn:
            admins.create(conn, name, role, admins.hash_password(PASSWORD), by=audit.COMMAND_LINE)

    def start(self) -> None:
        """Make an account, a key and a live group."""
        with unit_of_work(self.database) as conn:
            self.account_id = ensure_account(conn, "acme films")
            create_key(conn, self.account_id, self.settings.key_pepper, name="render script")
            register(conn, Group("render-01-tiny-cpu-0", "render-01", PROFILE, "", "boot-1"))
            heartbeat(conn, "render-01-tiny-cpu-0", "boot-1", "ready", {"engine": "null", "torch": "2.13.0"})

    def submit(self, prompt: str = "A red fox walks through fresh snow.", **options: Any) -> str:
        request = GenerationRequest(prompt=prompt, tier="272p", num_inference_steps=8, seed=7)
        wanted = Submission(
            account_id=self.account_id,
            profile=PROFILE,
            request=request,
            exec_timeout_s=900,
            retention_s=604_800,
            **options,
        )
        with unit_of_work(self.database) as conn:
            return submit(conn, wanted).id

    def claim(self, group: str = "render-01-tiny-cpu-0", boot: str = "boot-1") -> Claimed:
        with unit_of_work(self.database) as conn:
            claimed = claim(conn, group, PROFILE, boot, [CONTRACT_VERSION])
            assert claimed is not None
            assert mark_running(conn, claimed.job.id, claimed.epoch)
            heartbeat(conn, group, boot, "busy")
        return claimed

    def report(self, claimed: Claimed, step: int) -> None:
        with unit_of_work(self.database) as conn:
            group = str(claimed.job.group_id)
            assert beat(conn, claimed.job.id, claimed.epoch, group, Progress("denoise", step, 8)) is not None

    def finish(self, claimed: Claimed) -> None:
        """Store a clip and its picture, and end the job well."""
        of, epoch = claimed.job, claimed.epoch
        with unit_of_work(self.database) as conn:
            assert mark_uploading(conn, of.id, epoch)
        assets = []
        for kind, name, media_type, data in (
            ("video", "video.mp4", "video/mp4", clip_bytes()),
            ("thumb", "thumb.jpg", "image/jpeg", jpeg_bytes()),
            ("meta", "meta.json", "application/json", b'{"seed": 7}'),
        ):
            key = output_key(of.account_id, of.id, epoch, name, now())
            stored = self.store.put(key, data, media_type)
            assets.append(NewAsset(kind, key, stored.bytes, str(stored.sha256), media_type, 448, 256))
        data = {
            "stage_durations": {"text_encode": 0.4, "denoise": 21.5, "decode_video": 6.2},
            "peak_memory_mb": 812.0,
        }
        with unit_of_work(self.database) as conn:
            assert succeed(conn, of.id, epoch, Result(data, assets, {"denoise": 21.5}, 812))
            heartbeat(conn, str(of.group_id), "boot-1", "ready")

    def fail(self, claimed: Claimed, kind: FailureKind = FailureKind.INVALID_INPUT) -> None:
        detail = {"exit_code": -9, "log": ["rank 0: loading", "rank 0: killed"], "kind": "crash"}
        with unit_of_work(self.database) as conn:
            fail(conn, claimed.job.id, claimed.epoch, Failure(kind, detail=detail))
            heartbeat(conn, str(claimed.job.group_id), "boot-1", "ready")

    def endpoint(self, url: str = "https://hooks.example.com/a/very/long/path/for/video/events") -> str:
        with unit_of_work(self.database) as conn:
            sealed = {"hmac": seal(self.settings.secret_key, "whsec_" + "x" * 32)}
            events = ["video.completed", "video.failed", "video.canceled"]
            return create_endpoint(conn, self.account_id, NewEndpoint(url, events, "studio hook"), sealed).id

    def execute(self, statement: str, **values: Any) -> list[Any]:
        with unit_of_work(self.database) as conn:
            result = conn.execute(text(statement), values)
            return list(result.all()) if result.returns_rows else []

    def bury_delivery(self, delivery_id: str | None = None) -> str:
        """Let the newest delivery have failed for good."""
        [(found,)] = self.execute(
            "UPDATE webhook_delivery SET status = 'dead', attempts = 10, last_status = 500,"
            " last_error = 'http_status'"
            " WHERE id = coalesce(:id, (SELECT max(id) FROM webhook_delivery)) RETURNING id",
            id=delivery_id,
        )
        self.execute(
            "INSERT INTO webhook_attempt (delivery_id, n, at, duration_ms, http_status, error,"
            " response_excerpt, resolved_ip)"
            " VALUES (:id, 10, now() - interval '5 minutes', 812, 500, 'http_status',"
            " '<h1>Oops</h1> the receiver broke', '93.184.216.34')",
            id=found,
        )
        return str(found)

    def live_long(self) -> dict[str, str]:
        """Fill every page with something to show; return the ids of what pages are about."""
        self.start()
        endpoint_id = self.endpoint()
        done_id = self.submit(
            "A paper boat drifts down a rainy street at dusk, cinematic.", user_tag="storyboard 7"
        )
        self.finish(self.claim())
        delivery_id = self.bury_delivery()
        failed_id = self.submit(MARKUP)
        self.fail(self.claim())
        canceled_id = self.submit("A canceled thing")
        with unit_of_work(self.database) as conn:
            request_cancel(conn, self.account_id, canceled_id, "key:abcd1234")
        poison_id = self.submit("A job that crashes workers")
        self.fail(self.claim(), FailureKind.CRASH)
        self.execute("UPDATE job SET not_before = now() WHERE id = :id", id=poison_id)
        with unit_of_work(self.database) as conn:
            quarantine_job(conn, poison_id, "admin:night shift", "crashed two workers")
            for number in range(2, 5):
                name = f"render-0{number}-sp4-0123"
                register(conn, Group(name, f"render-0{number}.example", "sp4", "0,1,2,3", "boot-1"))
                state = ("ready", "busy", "sick")[number - 2]
                heartbeat(conn, name, "boot-1", state, {"engine": "magi2"}, stats_of(state))
            set_wanted_state(conn, "render-02-sp4-0123", Wish.DRAINING, "admin:alice")
            pause_profile(conn, "dlo-dp4", "admin:alice", "new weights are copied")
            ensure_account(conn, "an account with quite a long name that goes on and on")
            audit.record(
                conn, "admin:alice", "job.cancel", canceled_id, {"state": "queued"}, {"state": "canceled"}
            )
        self._waves()
        running = self.submit("A lighthouse in a storm, waves breaking over black rocks, night, thunder.")
        held = self.claim()
        self.report(held, 3)
        for number in range(6):
            self.submit(
                LONG if number == 2 else f"Shot {number}: a market street in the morning", priority=number - 2
            )
        self._age()
        return {
            "done": done_id,
            "failed": failed_id,
            "poison": poison_id,
            "running": running,
            "endpoint": endpoint_id,
            "delivery": delivery_id,
        }

    def _waves(self) -> None:
        """Let jobs wait for a wave of two, and remember one of four that had a ghost."""
        request = GenerationRequest(prompt="A wave", tier="540p", num_inference_steps=100, seed=1)
        wanted = Submission(
            account_id=self.account_id,
            profile="dlo-dp2sp2",
            request=request,
            exec_timeout_s=900,
            retention_s=604_800,
        )
        with unit_of_work(self.database) as conn:
            submit(conn, wanted)
        self.execute(
            "INSERT INTO wave (id, profile, wave_key, group_id, num_slots, num_members, num_ghosts, fill,"
            " waited_s, ended_at, outcome) VALUES ('wave_01h00000000000000000000000', 'dlo-dp4',"
            " '540p/100/det=0', 'render-05-dlo-dp4-0123', 4, 3, 1, 'pad', 61, now(), 'ended')"
        )
        self.execute(
            "UPDATE job_attempt SET wave_id = 'wave_01h00000000000000000000000' WHERE outcome IS NOT NULL"
        )

    def _age(self) -> None:
        """Spread a day of finished jobs over the charts, beside those that really ran."""
        at = now()
        with unit_of_work(self.database) as conn:
            row = dict(conn.execute(select(job).where(job.c.state == State.SUCCEEDED)).mappings().one())
            conn.execute(text("SET LOCAL session_replication_role = replica"))  # past what the guard allows
            for number in range(1, 80):
                if number * 7 % 13 <= 3:
                    continue
                ended = at - timedelta(minutes=17 * number)
                queued = ended - timedelta(minutes=2 + number % 5)
                changes = {
                    "id": f"video_{number:026d}",
                    "state": "failed" if number % 11 == 3 else "succeeded",
                    "queued_at": queued,
                    "created_at": queued,
                    "started_at": ended - timedelta(seconds=90),
                    "finished_at": ended,
                }
                conn.execute(insert(job).values(**{**row, **changes}))
        self.execute("UPDATE job SET queued_at = queued_at - interval '25 minutes' WHERE state = 'queued'")
        self.execute(
            "INSERT INTO farm_sample SELECT date_trunc('minute', now()) - n * interval '7 minutes',"
            " 6 + n % 31, 3 - n / 90, 2 - n / 120, greatest(0, n % 50 - 44) FROM generate_series(0, 160) n"
        )
