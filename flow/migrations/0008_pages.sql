-- Doors for people without Slack: the web inbox with its sessions, and links that one person may use once.

-- Signs cookies and form tokens. In the database, so that every bot of this installation has the same. (There is no
-- function for random bytes without an extension; three random UUIDs hold 366 bits.)
ALTER TABLE installation ADD COLUMN session_secret bytea NOT NULL DEFAULT
    sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8'));

CREATE TABLE sessions (
    -- Of the token in the cookie, which is kept nowhere.
    token_sha256 bytea PRIMARY KEY,
    -- The person as the door that signed them in vouched for them.
    person       text NOT NULL,
    person_name  text NOT NULL,
    names        text[] NOT NULL CHECK (person = ANY (names)),
    signed_in_by text NOT NULL CHECK (signed_in_by IN ('link', 'slack')),
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at   timestamptz NOT NULL
);
CREATE INDEX sessions_oldest ON sessions (expires_at);

-- What `login` prints: signs one person in, once.
CREATE TABLE login_links (
    token_sha256 bytea PRIMARY KEY,
    person       text NOT NULL,
    person_name  text NOT NULL,
    names        text[] NOT NULL CHECK (person = ANY (names)),
    made_by      text NOT NULL,
    made_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at   timestamptz NOT NULL,
    used_at      timestamptz
);

-- One person's way to decide one approval, once; and the outbox of the mails that bring it.
CREATE TABLE links (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    interrupt_id  text COLLATE "C" NOT NULL REFERENCES approvals,
    person        text NOT NULL CHECK (person LIKE 'mail:%'),
    -- Tokens are kept nowhere, so each attempt to mail the link makes one of its own. All of them are good: a mail whose
    -- sending got no answer may have arrived.
    tokens_sha256 bytea[] NOT NULL DEFAULT '{}',
    -- The second factor, which never travels with the link. Six digits hide nothing: the five tries protect it.
    code_sha256   bytea,
    code_tries    integer NOT NULL DEFAULT 0 CHECK (code_tries BETWEEN 0 AND 5),
    made_by       text NOT NULL,
    made_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    used_at       timestamptz,
    revoked_at    timestamptz,
    -- When to mail it, or when the lease of whoever is mailing it ends; NULL: it is not, or no longer, to be mailed.
    mail_due_at   timestamptz,
    -- Counts mailings begun, and fences a mailer whose lease ran out.
    mail_attempt  integer NOT NULL DEFAULT 0,
    mailed_at     timestamptz,
    mail_error    text,
    CHECK (used_at IS NULL OR revoked_at IS NULL)
);
-- One person has one open link to an approval.
CREATE UNIQUE INDEX links_open ON links (interrupt_id, person) WHERE used_at IS NULL AND revoked_at IS NULL;
CREATE INDEX links_by_token ON links USING gin (tokens_sha256);
CREATE INDEX links_to_mail ON links (mail_due_at) WHERE mail_due_at IS NOT NULL;

-- What the inbox looks for.
CREATE INDEX approvals_by_approver ON approvals USING gin (approvers);
CREATE INDEX approvals_by_requester ON approvals (lower(requested_by), requested_at DESC, interrupt_id);
