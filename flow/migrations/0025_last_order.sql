-- When a provider outside was sent the last order, and under which address: what it does not know of so soon after that
-- may still be on its way, and another service does not know of it at all.
-- NULL: by a release that did not keep it, when the payment was begun.
ALTER TABLE payments
    ADD COLUMN asked_at timestamptz,
    ADD COLUMN asked_of text;
