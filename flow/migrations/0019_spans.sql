-- What a thread's processes did and how long each step took: one trace per thread, across processes and days.
--
-- Only what no other row tells is here (drives, nodes, calls to the outside). Waits for people, decisions and payments
-- are read from their own rows, and so are the thread's beginning and end: its root span is no row.

CREATE TABLE spans (
    -- No foreign key: it would be checked for each row, and these are the rows that may be lost.
    thread_id  text COLLATE "C" NOT NULL,
    span_id    text COLLATE "C" NOT NULL CHECK (span_id ~ '^[0-9a-f]{16}$'),
    -- NULL: the root of its thread (`root_of`).
    parent_id  text COLLATE "C" CHECK (parent_id ~ '^[0-9a-f]{16}$'),
    name       text NOT NULL,
    -- client: a call to the outside.
    kind       text NOT NULL CHECK (kind IN ('internal', 'client')),
    started_at timestamptz NOT NULL,
    ended_at   timestamptz NOT NULL,
    -- The type of what was raised, never its text: that may quote anything.
    error      text,
    attributes jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (thread_id, span_id),
    CHECK (ended_at >= started_at)
);
-- They are forgotten oldest first (flow/retention.py).
CREATE INDEX spans_oldest ON spans (started_at);
-- Only written, and deleted a month later: as with checkpoints, what is emptied must be free for the next month.
ALTER TABLE spans SET (autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);

-- The W3C trace context that whoever started the thread sent along: https://www.w3.org/TR/trace-context/#traceparent-header
ALTER TABLE threads ADD COLUMN traceparent text
    CHECK (traceparent ~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$');

-- The id of the thread's trace, 32 hex digits: the caller's own, else one that every process finds by itself. No two
-- installations that send to one place have the same. Of columns and not of the row: a function of the row would hold on
-- to the table, which deploy/partitions.sql replaces.
CREATE FUNCTION trace_of(thread_id text, traceparent text) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT coalesce(substr(traceparent, 4, 32), md5(id || ':' || thread_id)) FROM installation
$$;

-- The id of its root span, 16 hex digits, found in the same way.
CREATE FUNCTION root_of(thread_id text) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT substr(md5('root:' || id || ':' || thread_id), 1, 16) FROM installation
$$;
