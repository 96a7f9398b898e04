-- Alarms: what the operators must be told of a thread. One standing row per thread; a later alarm is said once more.
ALTER TABLE notices
    DROP CONSTRAINT notices_kind_check,
    ADD CHECK (kind IN ('card', 'reply', 'alarm')),
    ALTER COLUMN interrupt_id DROP NOT NULL,
    ADD CHECK ((kind = 'alarm') = (interrupt_id IS NULL));
CREATE UNIQUE INDEX notices_alarm_of_thread ON notices (thread_id) WHERE kind = 'alarm';
CREATE INDEX notices_failed_of_thread ON notices (thread_id) WHERE status = 'failed';
