-- App Home and /claims list what one person filed, newest first, whoever else filed how much.
CREATE INDEX threads_by_requester ON threads (lower(requested_by), created_at DESC, thread_id);
