-- For what a copy was posted: a tier's channel ('' is the bot's own, which may change), or the member whose conversation
-- it is in. NULL: nobody noted it.
ALTER TABLE messages ADD COLUMN place text;

-- Its place among the requests that the thread is to make, one after the other; NULL: it is the only one, or nobody knows.
ALTER TABLE approvals
    ADD COLUMN step integer,
    ADD COLUMN steps integer,
    ADD CHECK ((step IS NULL) = (steps IS NULL)),
    ADD CHECK (step BETWEEN 1 AND steps);

-- Whoever changes past us what waits for a decision has its card say so, as soon as it is committed, and that it is whole
-- again if it was seen (`note_tampered`). Looked at then: we renew the fingerprint of what we change ourselves, in the
-- same transaction.
CREATE FUNCTION show_what_is_not_whole() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM approvals a WHERE a.interrupt_id = NEW.interrupt_id AND a.status = 'pending'
        AND (a.fingerprint = approval_fingerprint(a)) IS DISTINCT FROM (OLD.fingerprint = approval_fingerprint(OLD))
        AND (a.fingerprint IS DISTINCT FROM approval_fingerprint(a) OR EXISTS (SELECT FROM audit
            WHERE thread_id = a.thread_id AND interrupt_id = a.interrupt_id AND kind = 'approval.tampered')))
    THEN
        UPDATE notices SET version = version + 1,
            due_at = CASE WHEN status = 'sending' THEN due_at ELSE clock_timestamp() END,
            status = CASE WHEN status = 'sending' THEN status ELSE 'pending' END
            WHERE interrupt_id = NEW.interrupt_id AND kind = 'card';
        NOTIFY claim_flow;
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER approvals_not_whole AFTER UPDATE ON approvals DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.status = 'pending') EXECUTE FUNCTION show_what_is_not_whole();
