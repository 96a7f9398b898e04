-- Many workspaces of Slack on one installation: see flow/workspaces.py. With one token, in the settings, there is no row
-- here, and every `workspace` below is NULL.
CREATE TABLE workspaces (
    -- The id of the team, or of the grid where the app is installed in a whole Enterprise Grid.
    workspace      text COLLATE "C" PRIMARY KEY CHECK (workspace ~ '^[TE][A-Z0-9]{2,}$'),
    name           text NOT NULL,
    -- The bot's token, encrypted with TOKEN_KEYS. NULL: it is not installed there any more.
    token          text,
    installed_by   text NOT NULL,
    installed_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    uninstalled_at timestamptz,
    -- Where its requests are posted, and its alarms (NULL: there, too). NULL: nobody has said so yet.
    channel        text,
    ops_channel    text,
    -- Who must approve what there, as policy.toml has it. NULL: nobody has said so, and nothing is filed there.
    policy         text,
    -- Who files claims there, as FILERS has it.
    filers         text NOT NULL DEFAULT '',
    CHECK ((token IS NULL) = (uninstalled_at IS NOT NULL))
);

-- In which of them a thread was started: it is posted, decided and seen there alone.
ALTER TABLE threads ADD COLUMN workspace text COLLATE "C" REFERENCES workspaces;
ALTER TABLE approvals ADD COLUMN workspace text COLLATE "C";
ALTER TABLE delegations ADD COLUMN workspace text COLLATE "C";
ALTER TABLE events ADD COLUMN workspace text COLLATE "C";
CREATE INDEX events_of_workspace ON events (workspace, position) WHERE workspace IS NOT NULL;
-- Who is signed in, or has a token: whether they are of one of them. NULL: of none, or of the one that there is.
ALTER TABLE sessions ADD COLUMN workspace text COLLATE "C";
ALTER TABLE login_links ADD COLUMN workspace text COLLATE "C";
ALTER TABLE api_tokens ADD COLUMN workspace text COLLATE "C" REFERENCES workspaces;

-- In which it is asked is a part of what is asked. Without one the fingerprint is what it was.
CREATE OR REPLACE FUNCTION approval_fingerprint(a approvals) RETURNS bytea LANGUAGE sql STABLE AS $$
    SELECT sha256(convert_to(jsonb_build_array(a.interrupt_id, a.thread_id, a.tier, a.request, a.request_hash,
        a.requested_by, a.raised_by, a.approvers, a.required, a.self_approval, a.step_up, a.escalate_to)::text
        || coalesce(a.workspace, ''), 'UTF8'))
$$;
