-- Traces that go out (flow/exports.py): to where, and of which threads something is still to be sent there.

-- Where traces go. Addresses and keys are settings, and never here. No row: nothing below is ever written.
CREATE TABLE trace_targets (
    name        text COLLATE "C" PRIMARY KEY CHECK (name IN ('otlp', 'langfuse')),
    -- Times in a row that it took nothing; it is not asked before quiet_until.
    failures    integer NOT NULL DEFAULT 0,
    quiet_until timestamptz,
    -- What it said last, if it took nothing.
    error       text,
    -- The thread whose alarm tells of it. There is no second alarm until it has taken something again.
    alarm_of    text COLLATE "C"
);

-- Threads of which there is something new. Only ever added to by whoever writes spans: there is no row here that a
-- drive and a delivery could wait for.
CREATE TABLE trace_marks (
    thread_id text COLLATE "C" NOT NULL
);

CREATE TABLE trace_exports (
    target    text COLLATE "C" NOT NULL REFERENCES trace_targets ON DELETE CASCADE,
    thread_id text COLLATE "C" NOT NULL REFERENCES threads,
    -- Counts marks: whoever has sent what there was at an older one is not finished.
    version   integer NOT NULL DEFAULT 1,
    -- Counts leases, and fences a sender whose lease ran out.
    attempt   integer NOT NULL DEFAULT 0,
    -- When to send, or when the lease ends. NULL: the target has everything.
    due_at    timestamptz DEFAULT clock_timestamp(),
    -- A request with others was refused: it is sent by itself.
    alone     boolean NOT NULL DEFAULT false,
    -- Why it was given up.
    error     text,
    -- The spans that the target has, or has refused.
    sent      text[] NOT NULL DEFAULT '{}',
    -- When there was last something new; its spans are forgotten SPAN_RETENTION later at the latest, and so is this.
    marked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (target, thread_id)
);
CREATE INDEX trace_exports_due ON trace_exports (target, alone, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX trace_exports_oldest ON trace_exports (marked_at);

-- Each mark is deleted within seconds, and each export is updated at each step of its thread.
ALTER TABLE trace_targets SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 100);
ALTER TABLE trace_marks SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
ALTER TABLE trace_exports SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 500);

-- Triggers, so that it holds whoever writes a span or ends a thread. Without a target: one look at an empty table.
CREATE FUNCTION mark_traces_of_spans() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM trace_targets) THEN
        INSERT INTO trace_marks SELECT DISTINCT thread_id FROM written;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER spans_to_send AFTER INSERT ON spans REFERENCING NEW TABLE AS written
    FOR EACH STATEMENT EXECUTE FUNCTION mark_traces_of_spans();

-- The end of a thread is the end of its root span, which is no row.
CREATE FUNCTION mark_trace_of_thread() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM trace_targets) THEN
        INSERT INTO trace_marks VALUES (NEW.thread_id);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER threads_to_send AFTER UPDATE OF status ON threads
    FOR EACH ROW WHEN (OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL) EXECUTE FUNCTION mark_trace_of_thread();
