-- The rest of a tier's rules, copied into each request like the others; who speaks for whom; and amounts that changed.
ALTER TABLE approvals
    -- The place of its tier in the policy: 0 for the first.
    ADD COLUMN rank integer NOT NULL DEFAULT 0,
    -- What an expiry does: ends it, or, once, asks others too and begins the time anew.
    ADD COLUMN on_expiry text NOT NULL DEFAULT 'reject' CHECK (on_expiry IN ('reject', 'escalate')),
    ADD COLUMN escalate_to text[] NOT NULL DEFAULT '{}',
    ADD COLUMN expires_after_s double precision,
    ADD COLUMN escalated_at timestamptz,
    ADD COLUMN self_approval boolean NOT NULL DEFAULT false,
    -- A click in Slack alone does not approve it.
    ADD COLUMN step_up boolean NOT NULL DEFAULT false,
    -- Where its cards go: a channel (NULL: the bot's own), a message to each approver, or both.
    ADD COLUMN post_to text NOT NULL DEFAULT 'channel' CHECK (post_to IN ('channel', 'direct', 'both')),
    ADD COLUMN channel text,
    -- Superseded by a request for another amount: which, and proposed by whom.
    ADD COLUMN changed_to jsonb,
    ADD COLUMN changed_by text,
    ADD COLUMN changed_why text NOT NULL DEFAULT '',
    -- Names of whoever raised the amount to this one: they ask for it as much as whoever filed it.
    ADD COLUMN raised_by text[] NOT NULL DEFAULT '{}',
    ADD CHECK (changed_to IS NULL OR (status = 'superseded' AND changed_by IS NOT NULL)),
    ADD CHECK (on_expiry = 'reject' OR (cardinality(escalate_to) > 0 AND expires_after_s IS NOT NULL));
-- A release that knows none of these rules can ask nothing any more: its drives are tried again, by another.
ALTER TABLE approvals ALTER COLUMN rank DROP DEFAULT;
-- Nor can it decide, or expire, what it does not understand. (NOT VALID: what it has written before stays.)
ALTER TABLE approvals ADD CONSTRAINT approvals_escalate_first
    CHECK (status <> 'expired' OR on_expiry = 'reject' OR escalated_at IS NOT NULL) NOT VALID;

-- Slack user groups among the approvers, as flow.policy.is_group has it; and whether anything that waits lists one.
CREATE FUNCTION lists_group(names text[]) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT EXISTS (SELECT FROM unnest(names) AS name WHERE name ~ '^(S[A-Z0-9]{2,}|@.+)$')
$$;
CREATE INDEX approvals_listing_groups ON approvals (interrupt_id) WHERE status = 'pending' AND lists_group(approvers);

ALTER TABLE decisions
    -- Whoever gave their vote into this person's hands while away; NULL: they decided for themselves.
    ADD COLUMN for_person text,
    ADD COLUMN for_name text,
    -- The name by which the list of approvers had whoever's voice it is; NULL: at the command line, off the list.
    ADD COLUMN listed_as text,
    -- The rules were changed on purpose, and the person is not on the list any more.
    ADD COLUMN void boolean NOT NULL DEFAULT false,
    ADD CHECK ((for_person IS NULL) = (for_name IS NULL));
ALTER TABLE decisions ADD CONSTRAINT decisions_by_the_list
    CHECK (listed_as IS NOT NULL OR person LIKE 'cli:%') NOT VALID;
-- One voice, one vote, whoever gives it.
CREATE UNIQUE INDEX decisions_one_voice ON decisions (interrupt_id, coalesce(for_person, person), verdict) WHERE NOT void;

-- What is asked for by now, where that is no longer what was filed (fields of the input), and who raised its amount.
ALTER TABLE threads ADD COLUMN changed jsonb, ADD COLUMN raised_by text[];

-- What a request says and by which rules it is decided, as it was written: whoever changes it past us is found.
CREATE FUNCTION approval_fingerprint(a approvals) RETURNS bytea LANGUAGE sql STABLE AS $$
    SELECT sha256(convert_to(jsonb_build_array(a.interrupt_id, a.thread_id, a.tier, a.request, a.request_hash,
        a.requested_by, a.raised_by, a.approvers, a.required, a.self_approval, a.step_up, a.escalate_to)::text, 'UTF8'))
$$;
-- NULL: asked by a release that had none, and over since then. What goes on gets one here.
ALTER TABLE approvals ADD COLUMN fingerprint bytea;
UPDATE approvals a SET fingerprint = approval_fingerprint(a) FROM threads t WHERE t.thread_id = a.thread_id
    AND t.status NOT IN ('paid', 'rejected', 'expired', 'withdrawn', 'failed', 'done');
CREATE FUNCTION set_approval_fingerprint() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.fingerprint := approval_fingerprint(NEW);
    RETURN NEW;
END
$$;
CREATE TRIGGER approvals_fingerprint BEFORE INSERT ON approvals
    FOR EACH ROW EXECUTE FUNCTION set_approval_fingerprint();

-- Who decides for whom, and until when.
CREATE TABLE delegations (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- Who is away: their key, and every name that a list may have them by.
    person      text NOT NULL,
    person_name text NOT NULL,
    names       text[] NOT NULL CHECK (person = ANY (names)),
    -- A name of whoever decides meanwhile.
    delegate    text NOT NULL CHECK (delegate <> ALL (names) AND NOT lists_group(ARRAY[delegate])),
    made_by     text NOT NULL,
    made_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    until       timestamptz NOT NULL,
    ended_at    timestamptz
);
CREATE INDEX delegations_to ON delegations (delegate, until) WHERE ended_at IS NULL;
-- One at a time.
CREATE UNIQUE INDEX delegations_of ON delegations (person) WHERE ended_at IS NULL;

ALTER TABLE events
    DROP CONSTRAINT events_type_check,
    ADD CONSTRAINT events_type_check CHECK (type IN (
        'approval.requested', 'approval.voted', 'approval.decided', 'approval.expired', 'approval.escalated',
        'approval.withdrawn', 'approval.changed', 'payment.paid', 'payment.unknown', 'thread.done', 'thread.stuck'));
