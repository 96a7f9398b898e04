-- When a provider outside was sent the last order, and under which address: what it does not know of so soon after that
-- may still be on its way, and another service does not know of it at all.
-- NULL: nobody kept it. What is under way may have been asked for until now.
ALTER TABLE payments
    ADD COLUMN asked_at timestamptz,
    ADD COLUMN asked_of text;
UPDATE payments SET asked_at = clock_timestamp() WHERE status = 'intended' AND attempts > 0;
