-- Payments that a provider outside makes: the intent is committed with its key before the call, the outcome after it.

-- Two installations may share one provider account and both have a thread t1: their keys must differ.
CREATE TABLE installation (
    id         uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    -- One row.
    singleton  boolean NOT NULL DEFAULT true UNIQUE CHECK (singleton)
);
INSERT INTO installation DEFAULT VALUES;

ALTER TABLE payments
    ALTER COLUMN reference DROP NOT NULL,
    ALTER COLUMN paid_at DROP NOT NULL,
    ALTER COLUMN paid_at DROP DEFAULT,
    ADD COLUMN idempotency_key text UNIQUE,
    ADD COLUMN attempts integer NOT NULL DEFAULT 0,
    ADD COLUMN reason text,
    ADD COLUMN intended_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    DROP CONSTRAINT payments_status_check,
    -- intended: the provider is, or is about to be, asked. unknown: no answer, and no safe way to ask again.
    ADD CHECK (status IN ('intended', 'paid', 'refused', 'unknown')),
    ADD CHECK ((status = 'paid') = (reference IS NOT NULL AND paid_at IS NOT NULL)),
    ADD CHECK (provider = 'ledger' OR idempotency_key IS NOT NULL);
CREATE INDEX payments_unknown ON payments (intended_at) WHERE status = 'unknown';
