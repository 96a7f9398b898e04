-- The newest of one workspace, however many others there are. With one token these are empty.
CREATE INDEX threads_of_workspace ON threads (workspace, created_at DESC, thread_id) WHERE workspace IS NOT NULL;
CREATE INDEX approvals_of_workspace ON approvals (workspace, requested_at DESC, interrupt_id)
    WHERE workspace IS NOT NULL;
