-- Rules that must hold are keys and checks here, not code.

CREATE TABLE threads (
    -- Chosen by the caller; it stands in URLs, in Slack and in an index.
    thread_id    text COLLATE "C" PRIMARY KEY CHECK (thread_id ~ '^[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}$'),
    flow         text NOT NULL,
    flow_version text NOT NULL,
    input        jsonb NOT NULL,
    requested_by text NOT NULL,
    status       text NOT NULL DEFAULT 'running' CHECK (status IN (
        'running', 'waiting', 'paid', 'rejected', 'expired', 'withdrawn', 'failed', 'stuck', 'unknown', 'done')),
    -- Why it is stuck or what failed last, in words for a person.
    reason       text,
    -- The queue: when the thread wants to be driven; NULL when it waits for a person or is over.
    due_at       timestamptz DEFAULT clock_timestamp(),
    -- Counts reasons to drive. A drive may clear due_at only if nothing was added since it began.
    wakes        bigint NOT NULL DEFAULT 0,
    -- Drives begun since the last one that succeeded. Written before the graph runs: a killed drive cannot count itself.
    attempts     integer NOT NULL DEFAULT 0,
    -- Who drives it, as pg_stat_activity knows them; a driver that overstays is terminated by this pid.
    driver_pid   integer,
    driven_at    timestamptz,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- A thread that is over is never driven again.
    CHECK (due_at IS NULL OR status NOT IN ('paid', 'rejected', 'expired', 'withdrawn', 'failed', 'done'))
);
CREATE INDEX threads_due ON threads (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX threads_newest ON threads (created_at DESC, thread_id);
CREATE INDEX threads_newest_by_status ON threads (status, created_at DESC, thread_id);

CREATE TABLE approvals (
    -- LangGraph's id of the interrupt that waits for the answer.
    interrupt_id text COLLATE "C" PRIMARY KEY CHECK (interrupt_id ~ '^[0-9a-f]{32}$'),
    thread_id    text COLLATE "C" NOT NULL REFERENCES threads,
    tier         text NOT NULL,
    -- What the person is shown.
    request      jsonb NOT NULL,
    request_hash text NOT NULL,
    requested_by text NOT NULL,
    -- The policy's rules as they were when it was requested; an empty list means that nobody can approve.
    approvers    text[] NOT NULL,
    required     integer NOT NULL CHECK (required > 0),
    status       text NOT NULL DEFAULT 'pending' CHECK (status IN (
        'pending', 'approved', 'rejected', 'expired', 'withdrawn', 'superseded')),
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at   timestamptz,
    settled_at   timestamptz,
    CHECK ((status = 'pending') = (settled_at IS NULL))
);
CREATE INDEX approvals_of_thread ON approvals (thread_id, requested_at);
CREATE INDEX approvals_to_expire ON approvals (expires_at) WHERE status = 'pending' AND expires_at IS NOT NULL;

CREATE TABLE decisions (
    interrupt_id text COLLATE "C" NOT NULL REFERENCES approvals,
    person       text NOT NULL,
    person_name  text NOT NULL,
    verdict      text NOT NULL CHECK (verdict IN ('approve', 'reject')),
    door         text NOT NULL,
    reason       text NOT NULL DEFAULT '',
    decided_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- One person, one voice.
    PRIMARY KEY (interrupt_id, person)
);

CREATE TABLE payments (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- Money moves once per thread.
    thread_id text COLLATE "C" NOT NULL UNIQUE REFERENCES threads,
    amount    numeric NOT NULL CHECK (amount > 0),
    currency  text NOT NULL,
    payee     text NOT NULL,
    provider  text NOT NULL,
    reference text NOT NULL,
    status    text NOT NULL CHECK (status IN ('paid')),
    paid_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (provider, reference)
);

-- The outbox. A card is one standing row per approval, made due again by each change; a reply is said once.
CREATE TABLE notices (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind         text NOT NULL CHECK (kind IN ('card', 'reply')),
    interrupt_id text COLLATE "C" NOT NULL REFERENCES approvals,
    thread_id    text COLLATE "C" NOT NULL REFERENCES threads,
    -- Counts changes of what it must show; a deliverer is finished only when it has shown this one.
    version      integer NOT NULL DEFAULT 1,
    status       text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'sending', 'sent', 'failed')),
    -- Counts deliveries begun, and fences a deliverer whose lease ran out.
    attempt      integer NOT NULL DEFAULT 0,
    -- pending: when to send; sending: when the lease ends.
    due_at       timestamptz DEFAULT clock_timestamp(),
    -- An earlier attempt may have been carried out although no answer came.
    ambiguous    boolean NOT NULL DEFAULT false,
    error        text,
    UNIQUE (interrupt_id, kind),
    CHECK ((status IN ('pending', 'sending')) = (due_at IS NOT NULL))
);
CREATE INDEX notices_due ON notices (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX notices_failed ON notices (id) WHERE status = 'failed';

-- Posted Slack messages: every copy of a request, all of which must become true.
CREATE TABLE messages (
    channel      text NOT NULL,
    ts           text NOT NULL,
    interrupt_id text COLLATE "C" NOT NULL REFERENCES approvals,
    posted_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (channel, ts)
);
CREATE INDEX messages_of_approval ON messages (interrupt_id);
