"""Ring again for jobs that wait although somebody could take them: a doorbell may have been lost.

At most two doorbells for each idle group, never one for each job; each names the oldest job that may start.
They go through the outbox like all others.
"""

from sqlalchemy import Connection, text

from farm.outbox import enqueue_doorbell, has_unsent

WAITED_S = 15
FRESH_S = 30

_WAITING = text(
    """
    SELECT idle.profile, head.id, least(2 * idle.num_groups, head.num_jobs) AS num_doorbells
    FROM (
        SELECT g.profile, count(*) AS num_groups FROM worker_group g
        WHERE g.state = 'ready' AND g.heartbeat_at > now() - make_interval(secs => :fresh_s)
          AND NOT EXISTS (SELECT FROM profile_control c WHERE c.profile = g.profile AND c.paused)
          AND NOT EXISTS (SELECT FROM job a
                          WHERE a.group_id = g.id AND a.state IN ('starting', 'running', 'uploading'))
        GROUP BY g.profile) idle
    CROSS JOIN LATERAL (
        SELECT (array_agg(e.id ORDER BY e.rank_at, e.id))[1] AS id, count(*) AS num_jobs
        FROM (SELECT j.id, j.rank_at FROM job j
              WHERE j.state = 'queued' AND j.profile = idle.profile
                AND greatest(j.queued_at, j.not_before) < now() - make_interval(secs => :waited_s)
              ORDER BY j.rank_at, j.id LIMIT 2 * idle.num_groups) e) head
    WHERE head.num_jobs > 0
    """
)


def re_ring(conn: Connection) -> int:
    """Ask for doorbells where jobs wait beside idle groups; return how many.

    While older doorbells still wait for the broker, more of them would not help.
    """
    if has_unsent(conn):
        return 0
    num_rung = 0
    for row in conn.execute(_WAITING, {"fresh_s": FRESH_S, "waited_s": WAITED_S}).all():
        for _ in range(row.num_doorbells):
            enqueue_doorbell(conn, row.id, row.profile)
        num_rung += row.num_doorbells
    return num_rung
