-- Members of a user group see what was decided, too: whether anything at all, and not only what waits, lists one.
DROP INDEX approvals_listing_groups;
CREATE INDEX approvals_listing_groups ON approvals (interrupt_id) WHERE lists_group(approvers);

-- Whoever has decided something sees it from then on, whatever became of the list that let them.
CREATE INDEX decisions_by_person ON decisions (person, interrupt_id);

-- What was decided, newest first, however much waits.
CREATE INDEX approvals_settled ON approvals (requested_at DESC, interrupt_id) WHERE status <> 'pending';
