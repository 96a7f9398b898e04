-- Requests that were taken back: by whom, and why.
ALTER TABLE approvals
    ADD COLUMN withdrawn_by text,
    ADD COLUMN withdrawn_why text NOT NULL DEFAULT '';
-- No release wrote one; somebody may have by hand.
UPDATE approvals SET withdrawn_by = 'unknown' WHERE status = 'withdrawn';
ALTER TABLE approvals ADD CHECK ((status = 'withdrawn') = (withdrawn_by IS NOT NULL));

ALTER TABLE events
    DROP CONSTRAINT events_type_check,
    ADD CONSTRAINT events_type_check CHECK (type IN (
        'approval.requested', 'approval.voted', 'approval.decided', 'approval.expired', 'approval.withdrawn',
        'payment.paid', 'payment.unknown', 'thread.done', 'thread.stuck'));
