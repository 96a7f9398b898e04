-- The audit log: rows that are written where they become true, only ever added, and chained after their commit.

CREATE TABLE audit (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind         text NOT NULL,
    -- No foreign keys: a row outlives what it tells of.
    thread_id    text COLLATE "C",
    interrupt_id text COLLATE "C",
    who          text NOT NULL,
    door         text NOT NULL,
    for_whom     text,
    -- The hash of the request that they were shown.
    shown        text,
    data         jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX audit_of_thread ON audit (thread_id, id) WHERE thread_id IS NOT NULL;
CREATE INDEX audit_policies ON audit (id) WHERE kind = 'policy.changed';

-- Ids are committed in any order, so no id tells which rows are still to be sealed; these rows do.
CREATE TABLE audit_unsealed (audit_id bigint PRIMARY KEY);

CREATE FUNCTION audit_wait_for_seal() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit_unsealed (audit_id) VALUES (NEW.id);
    RETURN NULL;
END $$;
CREATE TRIGGER audit_waits_for_seal AFTER INSERT ON audit FOR EACH ROW EXECUTE FUNCTION audit_wait_for_seal();

-- The chain. Each hash is of the one before it and of its row, as `flow.audit` writes them.
CREATE TABLE audit_seals (
    position bigint PRIMARY KEY CHECK (position > 0),
    audit_id bigint NOT NULL UNIQUE REFERENCES audit,
    sha256   bytea NOT NULL CHECK (length(sha256) = 32)
);

-- Where the chain ends: a chain that is cut off is shorter than this.
CREATE TABLE audit_head (
    position  bigint NOT NULL CHECK (position >= 0),
    sha256    bytea NOT NULL CHECK (length(sha256) = 32),
    -- One row.
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton)
);
INSERT INTO audit_head (position, sha256) VALUES (0, decode(repeat('00', 32), 'hex'));

-- Append-only, whoever asks: also the owner of the tables, and replicas.
CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit is append-only: % of % is refused', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse();
CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_seals
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse();
CREATE TRIGGER audit_append_only BEFORE DELETE OR TRUNCATE ON audit_head
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse();
CREATE TRIGGER audit_moves_on BEFORE UPDATE ON audit_head
    FOR EACH ROW WHEN (NEW.position <= OLD.position) EXECUTE FUNCTION audit_refuse();
ALTER TABLE audit ENABLE ALWAYS TRIGGER audit_append_only;
ALTER TABLE audit_seals ENABLE ALWAYS TRIGGER audit_append_only;
ALTER TABLE audit_head ENABLE ALWAYS TRIGGER audit_append_only, ENABLE ALWAYS TRIGGER audit_moves_on;

REVOKE UPDATE, DELETE, TRUNCATE ON audit, audit_seals FROM PUBLIC;
REVOKE DELETE, TRUNCATE ON audit_head FROM PUBLIC;
