-- Flows of every kind: what they come to, how far they are, and which workers have them.

ALTER TABLE threads
    -- What a flow without a payment has come to. json and not jsonb: that one refuses escaped NULs.
    ADD COLUMN result json,
    -- Steps of a long flow.
    ADD COLUMN progress_done bigint,
    ADD COLUMN progress_total bigint,
    ADD CHECK ((progress_done IS NULL) = (progress_total IS NULL)),
    DROP CONSTRAINT threads_status_check,
    -- unavailable: it wants to be driven, and no worker has its flow.
    ADD CONSTRAINT threads_status_check CHECK (status IN (
        'running', 'waiting', 'paid', 'rejected', 'expired', 'withdrawn', 'failed', 'stuck', 'unknown', 'unavailable',
        'done')),
    ADD CHECK (status <> 'unavailable' OR due_at IS NULL),
    ADD CHECK ((status = 'done') = (result IS NOT NULL));

-- A worker looks only for threads whose flow it has.
DROP INDEX threads_due;
CREATE INDEX threads_due ON threads (flow, flow_version, due_at) WHERE due_at IS NOT NULL;

-- And the worker that brings a flow back, only for those that wait for it.
CREATE INDEX threads_unavailable ON threads (flow, flow_version) WHERE status = 'unavailable';

-- What a person said beyond yes or no.
ALTER TABLE decisions ADD COLUMN answer jsonb;

ALTER TABLE events
    DROP CONSTRAINT events_type_check,
    ADD CONSTRAINT events_type_check CHECK (type IN (
        'approval.requested', 'approval.voted', 'approval.decided', 'approval.expired',
        'payment.paid', 'payment.unknown', 'thread.done', 'thread.stuck'));
