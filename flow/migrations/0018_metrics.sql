-- Since when the outside waits for a notice: due_at moves with each attempt. NULL: one that was written before this.
ALTER TABLE notices ADD COLUMN waits_since timestamptz;
ALTER TABLE notices ALTER COLUMN waits_since SET DEFAULT clock_timestamp();
