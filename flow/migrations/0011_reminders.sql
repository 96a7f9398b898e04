-- Reminders: how often, and when within a week, as the policy said when it was asked; and when the next one is due.
ALTER TABLE approvals
    ADD COLUMN remind_every_s double precision CHECK (remind_every_s > 0),
    ADD COLUMN working_hours text,
    ADD COLUMN remind_at timestamptz,
    ADD CHECK (remind_at IS NULL OR remind_every_s IS NOT NULL);
CREATE INDEX approvals_to_remind ON approvals (remind_at) WHERE status = 'pending' AND remind_at IS NOT NULL;

ALTER TABLE notices
    DROP CONSTRAINT notices_kind_check,
    ADD CONSTRAINT notices_kind_check CHECK (kind IN ('card', 'reply', 'reminder', 'alarm'));
