-- For what a copy was posted: a tier's channel ('' is the bot's own, which may change), or the member whose conversation
-- it is in. NULL: nobody noted it.
ALTER TABLE messages ADD COLUMN place text;

-- Its place among the requests that the thread is to make, one after the other; NULL: it is the only one, or nobody knows.
ALTER TABLE approvals
    ADD COLUMN step integer,
    ADD COLUMN steps integer,
    ADD CHECK ((step IS NULL) = (steps IS NULL)),
    ADD CHECK (step BETWEEN 1 AND steps);

-- What an alarm is to say whatever has become of it since: ids of requests that were changed past us. Emptied when said.
ALTER TABLE notices ADD COLUMN reasons text[] NOT NULL DEFAULT '{}';

-- Whoever changes past us what waits for a decision has its card say so, and the operators told, as soon as it is
-- committed, each time; and the card say that it is whole again. Looked at then: we renew the fingerprint of what we
-- change ourselves, in the same transaction.
CREATE FUNCTION show_what_is_not_whole() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    a approvals;
    was_whole boolean := coalesce(OLD.fingerprint = approval_fingerprint(OLD), false);
BEGIN
    SELECT * INTO a FROM approvals WHERE interrupt_id = NEW.interrupt_id AND status = 'pending';
    IF NOT FOUND OR coalesce(a.fingerprint = approval_fingerprint(a), false) = was_whole THEN
        RETURN NULL;
    END IF;
    IF was_whole THEN
        INSERT INTO audit (kind, thread_id, interrupt_id, who, door, shown, data) VALUES ('approval.tampered',
            a.thread_id, a.interrupt_id, 'clock', 'clock', a.request_hash, jsonb_build_object('status', a.status));
        INSERT INTO notices (kind, thread_id, version, status, due_at) VALUES ('alarm', a.thread_id, 0, 'sent', NULL)
            ON CONFLICT (thread_id) WHERE kind = 'alarm' DO NOTHING;
    ELSIF NOT EXISTS (SELECT FROM audit WHERE thread_id = a.thread_id AND interrupt_id = a.interrupt_id
        AND kind = 'approval.tampered')
    THEN
        RETURN NULL;
    END IF;
    UPDATE notices SET version = version + 1,
        reasons = CASE WHEN kind = 'alarm' THEN array_append(reasons, a.interrupt_id) ELSE reasons END,
        waits_since = CASE WHEN due_at IS NULL THEN clock_timestamp() ELSE waits_since END,
        due_at = CASE WHEN status = 'sending' THEN due_at ELSE clock_timestamp() END,
        status = CASE WHEN status = 'sending' THEN status ELSE 'pending' END
        WHERE (interrupt_id = a.interrupt_id AND kind = 'card')
        OR (was_whole AND thread_id = a.thread_id AND kind = 'alarm');
    NOTIFY claim_flow;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER approvals_not_whole AFTER UPDATE ON approvals DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.status = 'pending') EXECUTE FUNCTION show_what_is_not_whole();

-- Whom what waits names, however much they have decided before.
CREATE INDEX approvals_waiting_by_approver ON approvals USING gin (approvers) WHERE status = 'pending';

-- The queue of each lane, in its order. Reminders are a queue of their own: a morning's keep no card waiting.
CREATE FUNCTION notice_lane(kind text, version integer) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN kind = 'card' AND version > 1 THEN 'changes' WHEN kind IN ('card', 'reply') THEN 'posts'
        ELSE kind || 's' END
$$;
DROP INDEX notices_due;
CREATE INDEX notices_due ON notices (notice_lane(kind, version), due_at) WHERE due_at IS NOT NULL;
