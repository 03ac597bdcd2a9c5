"""A database trigger, for tests only, that refuses what the one transition function must never do.

It is made from the edge table itself and knows nothing of the Python that moves jobs: an edge that does not
exist, an epoch that falls or jumps, a move without an event number, an event number that is skipped.
"""

from sqlalchemy import Connection, text

from farm.jobs.states import EDGES

_EDGES = ", ".join(f"('{start}', '{end}')" for start, ends in EDGES.items() for end in ends)
_FUNCTION = f"""
    CREATE FUNCTION guard_job() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'INSERT' THEN
            IF NEW.state <> 'queued' OR NEW.epoch <> 0 OR NEW.seq <> 1 THEN
                RAISE EXCEPTION 'guard: a new job must be queued, not %', NEW.state;
            END IF;
            RETURN NEW;
        END IF;
        IF NEW.seq NOT IN (OLD.seq, OLD.seq + 1) THEN
            RAISE EXCEPTION 'guard: seq went from % to %', OLD.seq, NEW.seq;
        END IF;
        IF NEW.state = OLD.state THEN
            IF NEW.epoch <> OLD.epoch THEN
                RAISE EXCEPTION 'guard: epoch changed without a claim';
            END IF;
            RETURN NEW;
        END IF;
        IF (OLD.state, NEW.state) NOT IN ({_EDGES}) THEN
            RAISE EXCEPTION 'guard: no edge from % to %', OLD.state, NEW.state;
        END IF;
        IF NEW.epoch <> OLD.epoch + (NEW.state = 'starting')::int THEN
            RAISE EXCEPTION 'guard: epoch % does not follow %', NEW.epoch, OLD.epoch;
        END IF;
        IF NEW.seq <> OLD.seq + 1 THEN
            RAISE EXCEPTION 'guard: a move without an event number';
        END IF;
        RETURN NEW;
    END $$
"""
_TRIGGER = """
    CREATE TRIGGER guard_job BEFORE INSERT OR UPDATE ON job
    FOR EACH ROW EXECUTE FUNCTION guard_job()
"""


def install_state_guard(conn: Connection) -> None:
    """Guard the job table of this database."""
    conn.execute(text(_FUNCTION))
    conn.execute(text(_TRIGGER))
