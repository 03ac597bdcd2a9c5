"""Every table of the farm, as SQLAlchemy Core metadata.

The migrations build exactly this (a test compares the two catalogs). State columns are text with a CHECK; all
times are `timestamptz`; ids are text. What a column means is said here and nowhere else. No queries.
"""

from collections.abc import Sequence

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from farm.jobs.states import ACTIVE, State

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

_AT = DateTime(timezone=True)
_NOW = text("now()")
_EMPTY = text("'{}'::jsonb")
# Tables whose rows change all the time: clean them when 1 % is dead, not 20 %.
_BUSY = {"autovacuum_vacuum_scale_factor": "0.01"}


def words(values: Sequence[str]) -> str:
    """Return SQL string literals in a fixed order, for CHECKs and partial indexes."""
    return ", ".join(f"'{value}'" for value in values)


QUEUED_SQL = "state = 'queued'"
ACTIVE_SQL = f"state IN ({words([state for state in State if state in ACTIVE])})"

account = Table(
    "account",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("status", Text, nullable=False, server_default="active"),
    Column("limits", JSONB, nullable=False, server_default=_EMPTY),  # max_queued, max_running, gpu_s_per_day
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    CheckConstraint("status IN ('active', 'suspended')", name="status"),
)

# One row per account; locking it is the mutex of the account's quotas.
account_usage = Table(
    "account_usage",
    metadata,
    Column("account_id", Text, ForeignKey("account.id", ondelete="CASCADE"), primary_key=True),
    Column("queued", Integer, nullable=False, server_default="0"),
    Column("running", Integer, nullable=False, server_default="0"),
    Column("day", Date),  # of `gpu_s_used`, which is zero on every other day
    Column("gpu_s_used", BigInteger, nullable=False, server_default="0"),
    Column("gpu_s_reserved", BigInteger, nullable=False, server_default="0"),  # of jobs that have not ended
    CheckConstraint("queued >= 0", name="queued"),
    CheckConstraint("running >= 0", name="running"),
    CheckConstraint("gpu_s_used >= 0 AND gpu_s_reserved >= 0", name="gpu_s"),
    postgresql_with=_BUSY,
)

api_key = Table(
    "api_key",
    metadata,
    Column("id8", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("name", Text, nullable=False, server_default=""),
    Column("env", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False),  # HMAC-SHA-256 of the secret under the pepper
    Column("last4", Text, nullable=False),
    Column("scopes", ARRAY(Text), nullable=False),
    Column("cidrs", ARRAY(Text), nullable=False, server_default=text("'{}'")),  # empty: from anywhere
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    Column("expires_at", _AT),
    Column("revoked_at", _AT),
    Column("last_used_at", _AT),  # written at most once a minute
)

# Jobs that were submitted together; how they are doing is counted when it is asked for.
batch = Table(
    "batch",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("total", Integer, nullable=False),
    Column("done", Integer, nullable=False, server_default="0"),  # members that have ended
    Column("metadata", JSONB, nullable=False, server_default=_EMPTY),
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    Column("finished_at", _AT),  # the first time that all had ended
)

job = Table(
    "job",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("state", Text, nullable=False),
    Column("phase", Text),
    Column("profile", Text, nullable=False),
    Column("requested_profile", Text, nullable=False, server_default="auto"),
    Column("priority", SmallInteger, nullable=False, server_default="0"),
    Column("prompt", Text, nullable=False),
    Column("params", JSONB, nullable=False),  # the validated request, complete: GenerationRequest.to_json()
    Column("contract_version", Integer, nullable=False),
    Column("wave_key", Text, nullable=False),
    Column("input_asset_id", Text, ForeignKey("asset.id", use_alter=True)),
    Column("seed", BigInteger, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("step", Integer, nullable=False, server_default="0"),
    Column("progress", SmallInteger, nullable=False, server_default="0"),
    Column("epoch", Integer, nullable=False, server_default="0"),  # the fencing token; grows for ever
    # The budget of section 11.7; `retry` sets all eight back to zero.
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("infra_losses", Integer, nullable=False, server_default="0"),
    Column("preemptions", Integer, nullable=False, server_default="0"),
    Column("crash_count", Integer, nullable=False, server_default="0"),
    Column("engine_errors", Integer, nullable=False, server_default="0"),
    Column("upload_failures", Integer, nullable=False, server_default="0"),
    Column("crashed_waves", Integer, nullable=False, server_default="0"),  # with neighbours; two: runs alone
    Column("crash_groups", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("max_attempts", Integer, nullable=False, server_default="3"),
    Column("retry_count", Integer, nullable=False, server_default="0"),
    Column("group_id", Text),  # who runs it, or ran it last
    Column("avoid_group", Text),  # a group whose engine refused it; another one is preferred
    Column("lease_until", _AT),
    Column("not_before", _AT, nullable=False, server_default=_NOW),
    Column("queue_deadline", _AT, nullable=False),
    Column("expires_in_s", Integer, nullable=False),
    Column("exec_timeout_s", Integer, nullable=False),
    Column("attempt_deadline", _AT),
    Column("cancel_requested_at", _AT),
    Column("cancel_by", Text),
    Column("deleted_at", _AT),
    Column("error", JSONB),  # {code, message, retryable}
    Column("result", JSONB),
    Column("notices", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
    Column("metadata", JSONB, nullable=False, server_default=_EMPTY),
    Column("user_tag", Text),
    Column("retention_s", Integer, nullable=False),
    Column("seq", Integer, nullable=False, server_default="1"),  # of the newest job_event
    Column("rank_at", _AT, nullable=False),  # queued_at minus the head start of the priority
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    Column("queued_at", _AT, nullable=False, server_default=_NOW),
    Column("started_at", _AT),
    Column("running_at", _AT),
    Column("uploading_at", _AT),
    Column("finished_at", _AT),
    Column("batch_id", Text, ForeignKey("batch.id")),
    Column("reuse", Text, nullable=False, server_default="off"),
    Column("reuse_key", Text),  # digest of everything that decides what the clip looks like
    Column("gpus", Integer, nullable=False, server_default="1"),  # devices that it occupies, at least 1
    Column("gpu_s_reserved", Integer, nullable=False, server_default="0"),  # the estimate of its budget
    Column("traceparent", Text),  # of its submit; the trace that all of its spans belong to
    CheckConstraint(f"state IN ({words(list(State))})", name="state"),
    CheckConstraint(f"(lease_until IS NOT NULL) = ({ACTIVE_SQL})", name="lease"),
    CheckConstraint("priority BETWEEN -10 AND 10", name="priority"),
    CheckConstraint("progress BETWEEN 0 AND 100", name="progress"),
    Index("ix_job_claim", "profile", "account_id", "rank_at", "id", postgresql_where=text(QUEUED_SQL)),
    Index("ix_job_rank", "profile", "rank_at", "id", postgresql_where=text(QUEUED_SQL)),
    Index(
        "ix_job_wave",
        "profile",
        "wave_key",
        "account_id",
        "rank_at",
        "id",
        postgresql_where=text(QUEUED_SQL),
    ),
    Index("ix_job_lease", "lease_until", postgresql_where=text(ACTIVE_SQL)),
    Index("ix_job_ttl", "queue_deadline", postgresql_where=text(QUEUED_SQL)),
    Index(
        "ix_job_list",
        "account_id",
        text("created_at DESC"),
        text("id DESC"),
        postgresql_where=text("deleted_at IS NULL"),
    ),
    Index("ix_job_account_state", "account_id", "state"),
    Index("ix_job_finished", "profile", "finished_at", postgresql_where=text("state = 'succeeded'")),
    Index("ix_job_deleted", "deleted_at", postgresql_where=text("deleted_at IS NOT NULL")),
    Index("ix_job_metadata", "metadata", postgresql_using="gin"),
    Index("ix_job_batch", "batch_id", postgresql_where=text("batch_id IS NOT NULL")),
    Index("ix_job_input", "input_asset_id", postgresql_where=text("input_asset_id IS NOT NULL")),
    Index("ix_job_reuse", "account_id", "reuse_key", postgresql_where=text("state = 'succeeded'")),
    Index("ix_job_ended", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
    postgresql_with=_BUSY,
)

job_attempt = Table(
    "job_attempt",
    metadata,
    Column("job_id", Text, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("group_id", Text, nullable=False),
    Column("worker_boot_id", Text, nullable=False),
    Column("profile", Text, nullable=False),
    Column("queued_at", _AT, nullable=False),
    Column("started_at", _AT, nullable=False),
    Column("running_at", _AT),
    Column("uploading_at", _AT),
    Column("ended_at", _AT),
    Column("outcome", Text),
    Column("error", JSONB),  # {code, message, detail}: for operators, never shown to a user
    Column("timings", JSONB),
    Column("peak_memory_mb", Integer),
    Column("measured", JSONB),  # {device_memory_mb: [one a rank], host_pss_mb, num_samples}; WORKER__MEASURE
    Column("wave_id", Text),  # of a data-parallel profile; all members of a wave share it
    Column("cleaned_at", _AT),  # objects under this epoch's keys are gone
    CheckConstraint("outcome IN ('succeeded', 'failed', 'canceled', 'requeued')", name="outcome"),
    CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="ended"),
    Index("ux_job_attempt_succeeded", "job_id", unique=True, postgresql_where=text("outcome = 'succeeded'")),
    Index(
        "ix_job_attempt_garbage",
        "ended_at",
        postgresql_where=text("uploading_at IS NOT NULL AND cleaned_at IS NULL AND outcome <> 'succeeded'"),
    ),
    Index("ix_job_attempt_wave_id", "wave_id", postgresql_where=text("wave_id IS NOT NULL")),
)

job_event = Table(
    "job_event",
    metadata,
    Column("job_id", Text, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("type", Text, nullable=False),  # a state that was entered, or what else happened
    Column("at", _AT, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("data", JSONB, nullable=False, server_default=_EMPTY),
    Index("ix_job_event_at", "at"),
)

asset = Table(
    "asset",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("job_id", Text, ForeignKey("job.id", ondelete="CASCADE")),  # null: an input image
    Column("epoch", Integer),
    Column("key", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("media_type", Text, nullable=False),
    Column("width", Integer),
    Column("height", Integer),
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    Column("expires_at", _AT),
    Column("deleted_at", _AT),  # the object is gone
    CheckConstraint("kind IN ('input', 'video', 'thumb', 'sprite', 'audio', 'meta')", name="kind"),
    CheckConstraint("(kind = 'input') = (job_id IS NULL)", name="owner"),
    Index("ux_asset_job_kind", "job_id", "kind", unique=True, postgresql_where=text("job_id IS NOT NULL")),
    Index(
        "ux_asset_input",
        "account_id",
        "sha256",
        unique=True,
        postgresql_where=text("kind = 'input' AND deleted_at IS NULL"),
    ),
    Index("ix_asset_expires_at", "expires_at", postgresql_where=text("deleted_at IS NULL")),
)

# Written in the transaction of what was asked for; `status` is null in that transaction only.
idempotency_key = Table(
    "idempotency_key",
    metadata,
    Column("account_id", Text, ForeignKey("account.id", ondelete="CASCADE"), primary_key=True),
    Column("route", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("fingerprint", LargeBinary, nullable=False),
    Column("status", SmallInteger),
    Column("answer", LargeBinary),  # farm/secretbox.py: it may hold a secret that is shown once
    Column("job_id", Text),  # of a submit
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    Index("ix_idempotency_key_created_at", "created_at"),
    postgresql_with=_BUSY,
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("topic", Text, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    Column("locked_until", _AT),
    Column("sent_at", _AT),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("error", Text),
    Index("ix_outbox_unsent", "id", postgresql_where=text("sent_at IS NULL")),
    Index("ix_outbox_sent", "sent_at", postgresql_where=text("sent_at IS NOT NULL")),
    postgresql_with=_BUSY,
)

webhook_endpoint = Table(
    "webhook_endpoint",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id", ondelete="CASCADE"), nullable=False),
    # Null: the whole account. Checked at commit: the endpoint of a job is written just before the job.
    Column(
        "job_id",
        Text,
        ForeignKey("job.id", ondelete="CASCADE", deferrable=True, initially="DEFERRED"),
        index=True,
    ),
    Column("name", Text, nullable=False, server_default=""),
    Column("url", Text, nullable=False),
    Column("event_types", ARRAY(Text), nullable=False),
    Column("payload_mode", Text, nullable=False, server_default="thin"),
    Column("enabled", Boolean, nullable=False, server_default=text("true")),
    Column("disabled_reason", Text),
    Column("max_in_flight", Integer, nullable=False, server_default="1"),
    Column("failing_since", _AT),  # the first failure since the last success
    Column("paused_until", _AT),  # the receiver asked for time
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    Column("updated_at", _AT, nullable=False, server_default=_NOW),  # by its owner, not by deliveries
    Column("deleted_at", _AT),  # its deliveries stay readable for a while
    # Not null: of the end of one batch, and of nothing else.
    Column("batch_id", Text, ForeignKey("batch.id", ondelete="CASCADE"), index=True),
    CheckConstraint("max_in_flight BETWEEN 1 AND 10", name="max_in_flight"),
    CheckConstraint("payload_mode IN ('thin', 'full')", name="payload_mode"),
    # Endpoints of single jobs pile up; the ones of the account must be found without reading them.
    Index("ix_webhook_endpoint_account", "account_id", postgresql_where=text("job_id IS NULL")),
)

webhook_secret = Table(
    "webhook_secret",
    metadata,
    Column("id", Text, primary_key=True),
    Column(
        "endpoint_id",
        Text,
        ForeignKey("webhook_endpoint.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("kind", Text, nullable=False, server_default="hmac"),
    Column("ciphertext", LargeBinary, nullable=False),  # farm/secretbox.py, under SECRET_KEY
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    Column("retire_at", _AT),  # null: active without end
    CheckConstraint("kind IN ('hmac', 'ed25519')", name="kind"),
)

webhook_message = Table(
    "webhook_message",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id", ondelete="CASCADE"), nullable=False),
    Column("type", Text, nullable=False),
    Column("job_id", Text, ForeignKey("job.id", ondelete="CASCADE")),
    Column("seq", Integer),
    Column("body", JSONB, nullable=False),
    Column("full_data", JSONB),  # the whole object, if an endpoint asked for it
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    UniqueConstraint("job_id", "seq", "type"),
)

webhook_delivery = Table(
    "webhook_delivery",
    metadata,
    Column("id", Text, primary_key=True),
    Column("message_id", Text, ForeignKey("webhook_message.id", ondelete="CASCADE"), nullable=False),
    Column(
        "endpoint_id",
        Text,
        ForeignKey("webhook_endpoint.id", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("status", Text, nullable=False, server_default="pending"),
    Column("attempts", Integer, nullable=False, server_default="0"),
    # A replay starts a new round: its schedule begins after this many attempts and ends with that many.
    Column("round_start", Integer, nullable=False, server_default="0"),
    Column("max_attempts", Integer, nullable=False, server_default="10"),
    Column("next_attempt_at", _AT, nullable=False, server_default=_NOW),
    Column("lease_until", _AT),
    Column("lease_token", Text),
    Column("last_status", Integer),
    Column("last_error", Text),
    CheckConstraint("status IN ('pending', 'leased', 'ok', 'dead', 'canceled')", name="status"),
    UniqueConstraint("message_id", "endpoint_id"),
    Index("ix_webhook_delivery_endpoint", "endpoint_id", "id"),
    Index("ix_webhook_delivery_pending", "next_attempt_at", postgresql_where=text("status = 'pending'")),
    Index(
        "ix_webhook_delivery_due",
        "endpoint_id",
        "next_attempt_at",
        postgresql_where=text("status = 'pending'"),
    ),
    Index("ix_webhook_delivery_leased", "lease_until", postgresql_where=text("status = 'leased'")),
    Index("ix_webhook_delivery_dead", "endpoint_id", postgresql_where=text("status = 'dead'")),
    postgresql_with=_BUSY,
)

webhook_attempt = Table(
    "webhook_attempt",
    metadata,
    Column("delivery_id", Text, ForeignKey("webhook_delivery.id", ondelete="CASCADE"), primary_key=True),
    Column("n", Integer, primary_key=True, autoincrement=False),
    Column("at", _AT, nullable=False),
    Column("duration_ms", Integer, nullable=False),
    Column("http_status", Integer),
    Column("error", Text),
    Column("response_excerpt", Text),  # for operators only
    Column("resolved_ip", Text),
    Index("ix_webhook_attempt_at", "at"),
)

worker_group = Table(
    "worker_group",
    metadata,
    Column("id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("profile", Text, nullable=False),
    Column("devices", Text, nullable=False, server_default=""),
    Column("boot_id", Text, nullable=False),  # of the agent process; a restarted agent has another
    Column("state", Text, nullable=False),
    Column("wanted_state", Text),  # what an operator asks for, or nothing; `farm/groups.py` says what each is
    Column("wanted_by", Text),
    Column("wanted_profile", Text),  # what it shall serve next, while `changing` is wanted
    Column("engine_fingerprint", JSONB),
    Column("deterministic", Boolean),
    Column(
        "contract_versions", ARRAY(Integer), nullable=False, server_default=text("'{}'")
    ),  # it understands
    Column("stats", JSONB, nullable=False, server_default=_EMPTY),  # worker/health.py: devices, use, restarts
    Column("heartbeat_at", _AT, nullable=False),
    Column("started_at", _AT, nullable=False, server_default=_NOW),
    CheckConstraint(
        "state IN ('booting', 'ready', 'busy', 'draining', 'paused', 'sick', 'gone')", name="state"
    ),
    CheckConstraint(
        "wanted_state IN ('draining', 'leaving', 'paused', 'restarting', 'changing')", name="wanted_state"
    ),
)

# What an operator has set for a profile; a profile without a row runs by the defaults.
profile_control = Table(
    "profile_control",
    metadata,
    Column("profile", Text, primary_key=True),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("paused_reason", Text),
    Column("max_queued", Integer),  # jobs that may wait for it, of all accounts together; null: no limit
    Column("wave_size", Integer),  # fewer members than the layout has slots; null: all slots
    Column("wave_max_wait_s", Integer, nullable=False, server_default="60"),
    Column("wave_fill", Text, nullable=False, server_default="pad"),
    Column("changed_at", _AT, nullable=False, server_default=_NOW),
    Column("changed_by", Text),
    CheckConstraint("max_queued >= 0", name="max_queued"),
    CheckConstraint("wave_size >= 1", name="wave_size"),
    CheckConstraint("wave_max_wait_s >= 0", name="wave_max_wait_s"),
    CheckConstraint("wave_fill IN ('pad', 'spill', 'wait')", name="wave_fill"),
)

# One formed wave; its members are the attempts that name it.
wave = Table(
    "wave",
    metadata,
    Column("id", Text, primary_key=True),
    Column("profile", Text, nullable=False),
    Column("wave_key", Text, nullable=False),
    Column("group_id", Text, nullable=False),
    Column("num_slots", Integer, nullable=False),
    Column("num_members", Integer, nullable=False),
    Column("num_ghosts", Integer, nullable=False),  # slots without a live job; grows while members drop out
    Column("fill", Text, nullable=False),
    Column("waited_s", Integer, nullable=False),  # its oldest member
    Column("formed_at", _AT, nullable=False, server_default=_NOW),
    Column("ended_at", _AT),  # null for ever where its agent was lost
    Column("outcome", Text),
    CheckConstraint("fill IN ('full', 'pad', 'alone')", name="fill"),
    CheckConstraint("outcome IN ('ended', 'crashed', 'given_back')", name="outcome"),
    CheckConstraint("num_members BETWEEN 1 AND num_slots", name="num_members"),
    CheckConstraint("num_ghosts BETWEEN num_slots - num_members AND num_slots", name="num_ghosts"),
    Index("ix_wave_formed_at", "formed_at"),
)

# Jobs that are not started again until somebody says so.
quarantine = Table(
    "quarantine",
    metadata,
    Column("job_id", Text, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    Column("epoch", Integer, primary_key=True, autoincrement=False),  # of the job when it was put in
    Column("reason", Text, nullable=False),  # poison, operator
    Column("evidence", JSONB, nullable=False, server_default=_EMPTY),
    Column("at", _AT, nullable=False, server_default=_NOW),
    Column("put_by", Text),  # null: the failure policy
    Column("released_at", _AT),
    Column("released_by", Text),
    CheckConstraint("reason IN ('poison', 'operator')", name="reason"),
    CheckConstraint("(released_at IS NULL) = (released_by IS NULL)", name="released"),
    Index("ix_quarantine_at", "at"),
)

# The people of the dashboard. No password is stored, only its argon2id hash.
admin_user = Table(
    "admin_user",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("role", Text, nullable=False),
    Column("password_hash", Text, nullable=False),
    Column("failures", Integer, nullable=False, server_default="0"),  # wrong passwords in a row
    Column("locked_until", _AT),
    Column("disabled_at", _AT),
    Column("last_login_at", _AT),
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    CheckConstraint("role IN ('viewer', 'operator', 'admin')", name="role"),
)

admin_session = Table(
    "admin_session",
    metadata,
    Column("id", LargeBinary, primary_key=True),  # SHA-256 of what the cookie holds
    Column("admin_id", Text, ForeignKey("admin_user.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("csrf", Text, nullable=False),
    Column("created_at", _AT, nullable=False, server_default=_NOW),
    Column("rotated_at", _AT, nullable=False, server_default=_NOW),
    Column("former_id", LargeBinary, unique=True),  # works for a moment after a rotation
    Column("expires_at", _AT, nullable=False),
)

# Append only: a trigger of the migration refuses everything but INSERT.
audit_log = Table(
    "audit_log",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("at", _AT, nullable=False, server_default=_NOW),
    Column("actor", Text, nullable=False),  # admin:NAME, key:ID8, system
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("before", JSONB),
    Column("after", JSONB),
    Column("ip", Text),
    Index("ix_audit_log_target", "target", "id"),
    Index("ix_audit_log_actor", "actor", "id"),
)

# One row a minute for the overview; `farm/watch/history.py` keeps two days of them.
farm_sample = Table(
    "farm_sample",
    metadata,
    Column("at", _AT, primary_key=True),  # the full minute
    Column("queued", Integer, nullable=False),
    Column("groups_up", Integer, nullable=False),
    Column("groups_busy", Integer, nullable=False),
    Column("outbox_lag_s", Double, nullable=False),
)
