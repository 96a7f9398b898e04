-- Doors for programs: what they were answered, and who they are.

-- The first answer to a request that says how it is to be recognised when it comes again.
CREATE TABLE receipts (
    -- webhook: a Standard Webhooks id. api: an Idempotency-Key.
    door        text NOT NULL CHECK (door IN ('webhook', 'api')),
    sender      text NOT NULL,
    key         text NOT NULL,
    body_sha256 bytea NOT NULL,
    -- HTTP status and JSON body; NULL only inside the transaction that makes them.
    status      integer,
    answer      json,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (door, sender, key)
);
CREATE INDEX receipts_oldest ON receipts (received_at);

CREATE TABLE api_tokens (
    name         text PRIMARY KEY CHECK (name ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
    -- Of the token, which is shown once and kept nowhere.
    token_sha256 bytea NOT NULL UNIQUE,
    scopes       text[] NOT NULL CHECK (scopes <@ ARRAY['read', 'start', 'decide'] AND cardinality(scopes) > 0),
    created_by   text NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    revoked_at   timestamptz
);

-- What the lists of the API page through.
CREATE INDEX approvals_newest ON approvals (requested_at DESC, interrupt_id);
CREATE INDEX approvals_newest_by_status ON approvals (status, requested_at DESC, interrupt_id);
CREATE INDEX decisions_newest ON decisions (decided_at DESC, interrupt_id, person);
CREATE INDEX payments_newest_by_status ON payments (status, id DESC);
