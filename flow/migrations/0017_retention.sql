-- What is kept for how long (flow/retention.py), found by index; and how often each table is vacuumed.

-- When a thread ended, and when what only its run needed was deleted. A thread that goes on has neither.
ALTER TABLE threads ADD COLUMN ended_at timestamptz, ADD COLUMN pruned_at timestamptz;

-- A trigger, so that it holds whoever ends a thread, by whatever statement: what has no end is kept for ever.
CREATE FUNCTION set_thread_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.ended_at := CASE WHEN NEW.status IN ('paid', 'rejected', 'expired', 'withdrawn', 'failed', 'done')
        THEN coalesce(NEW.ended_at, clock_timestamp()) END;
    RETURN NEW;
END
$$;
-- Its last drive began right before its end.
UPDATE threads SET ended_at = coalesce(driven_at, created_at)
    WHERE status IN ('paid', 'rejected', 'expired', 'withdrawn', 'failed', 'done');
CREATE TRIGGER threads_end BEFORE INSERT OR UPDATE OF status ON threads
    FOR EACH ROW EXECUTE FUNCTION set_thread_end();
ALTER TABLE threads
    ADD CHECK ((ended_at IS NOT NULL) = (status IN ('paid', 'rejected', 'expired', 'withdrawn', 'failed', 'done'))),
    ADD CHECK (pruned_at IS NULL OR ended_at IS NOT NULL);
CREATE INDEX threads_to_prune ON threads (ended_at, thread_id) WHERE ended_at IS NOT NULL AND pruned_at IS NULL;

-- What was said of a thread is deleted with its checkpoints, and shown on its page.
DROP INDEX notices_failed_of_thread;
CREATE INDEX notices_of_thread ON notices (thread_id);

-- Events are forgotten oldest first. Whoever reads them in order must hear if some that they have not read are gone.
ALTER TABLE installation ADD COLUMN events_forgotten bigint NOT NULL DEFAULT 0;
CREATE INDEX events_oldest ON events (created_at, position);
CREATE INDEX webhook_deliveries_of_event ON webhook_deliveries (event_id);
CREATE INDEX links_of_approval ON links (interrupt_id);
CREATE INDEX login_links_oldest ON login_links (expires_at);

-- Vacuuming. Postgres waits until a fifth of a table is dead. These are the tables that grow for ever and of which only
-- the newest rows change: a fifth of them would be weeks of dead rows, and the partial indexes that are our queues
-- would be searched through as many dead entries at each look. So a hundredth, or 500 rows.
--
-- Room for a second version of a row on its own page (fillfactor) helps only updates that change no indexed column: then
-- no index is written. A drive takes a thread so, an effect and a receipt get their outcome so. The others change what
-- is due, which is indexed, and would only waste the room.
ALTER TABLE threads SET (
    fillfactor = 85, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 500);
ALTER TABLE approvals SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 500);
ALTER TABLE notices SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 500);
ALTER TABLE webhook_deliveries SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 500);
ALTER TABLE links SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 500);
-- Each event is written twice: it gets its position after its commit.
ALTER TABLE events SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 500);
ALTER TABLE effects SET (
    fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
ALTER TABLE receipts SET (
    fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500);
-- Empty but for the last seconds: every row of it dies.
ALTER TABLE audit_unsealed SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
-- One row each, updated at every seal and at every event that is spread: a page, as long as it is vacuumed.
ALTER TABLE audit_head SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 100);
ALTER TABLE webhook_endpoints SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 100);
-- The rest (decisions, payments, audit, audit_seals, messages, advice ...) hardly changes: Postgres's defaults are right.

-- LangGraph's tables, if they are there already (flow/drive.py makes them): all of it is deleted a week after it was
-- written, so what retention empties must be free for the next week. Long values lie in a table of their own, which is
-- vacuumed by its own settings.
ALTER TABLE IF EXISTS checkpoints SET (
    autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE IF EXISTS checkpoint_blobs SET (
    autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE IF EXISTS checkpoint_writes SET (
    autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);
