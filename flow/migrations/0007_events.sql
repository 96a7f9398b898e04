-- What has happened, for programs: written where it becomes true, read in order, and sent to the endpoints.

CREATE TABLE events (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    type         text NOT NULL CHECK (type IN (
        'approval.requested', 'approval.voted', 'approval.decided', 'approval.expired',
        'payment.paid', 'payment.unknown', 'thread.stuck')),
    thread_id    text COLLATE "C" NOT NULL REFERENCES threads,
    interrupt_id text COLLATE "C" REFERENCES approvals,
    -- As it was then; what is sent is made from this alone, so that it is the same at each attempt.
    data         jsonb NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Ids are committed in any order. This is given afterwards, in the order in which events became visible.
    position     bigint UNIQUE,
    CHECK (type NOT LIKE 'approval.%' OR interrupt_id IS NOT NULL)
);
CREATE INDEX events_without_position ON events (id) WHERE position IS NULL;
CREATE SEQUENCE events_position;

-- Where events are sent, by the name in WEBHOOK_URLS. Their URLs and secrets are settings, and never here.
CREATE TABLE webhook_endpoints (
    name          text COLLATE "C" PRIMARY KEY CHECK (name ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
    -- Every event up to this one has its delivery; it begins where the endpoint was first heard of.
    position      bigint NOT NULL,
    -- It said 410: it wants nothing more.
    turned_off_at timestamptz,
    reason        text,
    -- It has asked to be left alone until then.
    quiet_until   timestamptz,
    CHECK ((turned_off_at IS NULL) = (reason IS NULL))
);

CREATE TABLE webhook_deliveries (
    endpoint text COLLATE "C" NOT NULL REFERENCES webhook_endpoints,
    event_id bigint NOT NULL REFERENCES events,
    status   text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'sending', 'sent', 'dead')),
    -- Counts deliveries begun, and fences a deliverer whose lease ran out.
    attempt  integer NOT NULL DEFAULT 0,
    -- Those of them since somebody last had it sent again: its place in the schedule.
    tries    integer NOT NULL DEFAULT 0,
    -- pending: when to send; sending: when the lease ends.
    due_at   timestamptz DEFAULT clock_timestamp(),
    -- What the last attempt got.
    error    text,
    sent_at  timestamptz,
    -- One event goes to one endpoint once.
    PRIMARY KEY (endpoint, event_id),
    CHECK ((status IN ('pending', 'sending')) = (due_at IS NOT NULL)),
    CHECK (status <> 'sent' OR sent_at IS NOT NULL)
);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (endpoint, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX webhook_deliveries_dead ON webhook_deliveries (endpoint, event_id) WHERE status = 'dead';
