-- Calls to the outside that `@idempotent` records: the row is committed before the call, the outcome after it.

CREATE TABLE effects (
    thread_id   text COLLATE "C" NOT NULL REFERENCES threads,
    -- auto: and a hash of function, place in the thread and arguments; or key: and what its author chose.
    key         text COLLATE "C" NOT NULL,
    -- Module and qualified name of the function.
    name        text NOT NULL,
    -- Of the arguments; they themselves are not kept.
    fingerprint text NOT NULL,
    -- started: it is, or was when its process died, under way. failed: for good, with the error.
    status      text NOT NULL DEFAULT 'started' CHECK (status IN ('started', 'done', 'failed')),
    -- Counts calls begun, and fences an older one.
    attempt     integer NOT NULL DEFAULT 1,
    -- Until then a call whose drive is gone may still be under way.
    lease_until timestamptz NOT NULL,
    -- json and not jsonb: that one refuses escaped characters that a result may hold. JSON's null is a result too.
    result      json,
    -- failed: the exception's type, arguments and text. done without a result: why it could not be kept.
    error       json,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at    timestamptz,
    PRIMARY KEY (thread_id, key),
    CHECK ((status = 'started') = (ended_at IS NULL)),
    CHECK ((result IS NOT NULL) = (status = 'done' AND error IS NULL))
);
