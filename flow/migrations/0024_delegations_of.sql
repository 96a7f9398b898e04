-- One at a time, for each person and workspace: the same address may be away in two.
DROP INDEX delegations_of;
CREATE UNIQUE INDEX delegations_of ON delegations (person, coalesce(workspace, '')) WHERE ended_at IS NULL;
