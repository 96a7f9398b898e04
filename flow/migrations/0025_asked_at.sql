-- When a provider outside was sent the last order: what it does not know of so soon after that may still be on its way.
-- NULL: by a release that did not keep it, when the payment was begun.
ALTER TABLE payments ADD COLUMN asked_at timestamptz;
