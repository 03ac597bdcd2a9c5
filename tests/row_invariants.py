"""The invariants that rows alone can show: each query finds rows that must not exist.

They hold at any moment at which no transaction is open, not only after everything has ended. The names are
those of the farm's specification (I1 to I12); the invariants that need more than rows are in
`tests/chaos/invariants.py`.
"""

from farm.jobs.states import ACTIVE

_ACTIVE = ", ".join(f"'{state}'" for state in ACTIVE)

NEVER = {
    "I2 numbers without gaps": (
        "SELECT job_id FROM job_event GROUP BY job_id HAVING count(*) <> max(seq) OR min(seq) <> 1"
    ),
    "I2 the job knows the newest number": (
        "SELECT id FROM job j WHERE seq <> (SELECT max(seq) FROM job_event e WHERE e.job_id = j.id)"
    ),
    "I3 nobody wins twice": (
        "SELECT job_id FROM job_attempt WHERE outcome = 'succeeded' GROUP BY job_id HAVING count(*) > 1"
    ),
    "I3 success is that of the newest attempt": """
        SELECT id FROM job j WHERE (state = 'succeeded') <> EXISTS (
            SELECT FROM job_attempt a
            WHERE a.job_id = j.id AND a.epoch = j.epoch AND a.outcome = 'succeeded')""",
    "I4 success comes with its object": """
        SELECT id FROM job j WHERE (state = 'succeeded') <> EXISTS (
            SELECT FROM asset a WHERE a.job_id = j.id AND a.epoch = j.epoch AND a.kind = 'video')""",
    "I6 counters equal a recount": f"""
        SELECT account_id FROM account_usage u WHERE (queued, running) <> (
            SELECT count(*) FILTER (WHERE state = 'queued'), count(*) FILTER (WHERE state IN ({_ACTIVE}))
            FROM job j WHERE j.account_id = u.account_id)""",
    "I7 every event is told once to each who subscribed": """
        SELECT e.id, v.job_id, v.seq FROM webhook_endpoint e
        JOIN job j ON j.account_id = e.account_id AND (e.job_id IS NULL OR e.job_id = j.id)
        JOIN job_event v ON v.job_id = j.id
        WHERE 'video.' || replace(replace(v.type, 'succeeded', 'completed'), 'starting', 'started')
              = ANY(e.event_types)
          AND 1 <> (SELECT count(*) FROM webhook_message m JOIN webhook_delivery d ON d.message_id = m.id
                    WHERE m.job_id = j.id AND m.seq = v.seq AND d.endpoint_id = e.id)""",
    "I7 nothing is told that did not happen": """
        SELECT m.id FROM webhook_message m
        WHERE (m.type <> 'video.progress'
               AND NOT EXISTS (SELECT FROM job_event v WHERE v.job_id = m.job_id AND v.seq = m.seq))
           OR NOT EXISTS (SELECT FROM webhook_delivery d WHERE d.message_id = m.id)""",
    "I8 neither epochs nor times of events fall": """
        SELECT job_id FROM (
            SELECT job_id, epoch, at, lag(epoch) OVER w AS epoch_before, lag(at) OVER w AS at_before
            FROM job_event WINDOW w AS (PARTITION BY job_id ORDER BY seq)) e
        WHERE epoch < epoch_before OR at < at_before""",
    "I8 every epoch is one attempt": """
        SELECT id FROM job j WHERE (j.epoch, j.epoch) <> (
            SELECT count(*), coalesce(max(a.epoch), 0) FROM job_attempt a WHERE a.job_id = j.id)""",
}
# An active job has an open attempt of its epoch, and no other job has one.
IN_FLIGHT = f"""
    SELECT id FROM job j WHERE (state IN ({_ACTIVE})) <> EXISTS (
        SELECT FROM job_attempt a WHERE a.job_id = j.id AND a.epoch = j.epoch AND a.outcome IS NULL)
    UNION ALL
    SELECT a.job_id FROM job_attempt a JOIN job j ON j.id = a.job_id
    WHERE outcome IS NULL AND a.epoch < j.epoch"""
