"""A database as it is after years: as many threads as are wanted, with all their rows; a million takes some minutes.

Most are paid. Of a hundred one waits for a person, one is put off until tomorrow, one was rejected and one expired.
What is due, and what the people below see, is the same however many others there are.

The rows are as the code leaves them, but for the audit log's seals, which are of nothing: `audit verify` would say so.
Wants a superuser: foreign keys and triggers would take longer than the rows.
"""

from __future__ import annotations

from typing import LiteralString

from flow.database import Connection
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION, Person
from tests.people import slack_person

GROUP = "S0GROUP1"

# Whom a dozen rows name of each list, long ago and lately; and whom more wait for than anybody counts.
FEW = slack_person("U01ALICE", "Alice")
BUSY = slack_person("U09BUSY", "Busy")
# Asks for nothing and decides nothing.
NOBODY = slack_person("U66EVE", "Eve")
PEOPLE: tuple[Person, ...] = (FEW, BUSY, NOBODY)

# Fewer than a worker looks at at once.
DUE = 60
_GROUP = "S0GROUP"

# One row for each thread, from which all others are made. `number` orders them by time, the newest first.
_WANTED = """
CREATE TEMP TABLE wanted (
    number bigint, thread_id text COLLATE "C", status text, requested_by text, approvers text[], filed_at timestamptz
)"""

_OTHERS = """
INSERT INTO wanted SELECT n, 'other-' || n,
    CASE n %% 100 WHEN 1 THEN 'rejected' WHEN 2 THEN 'expired' WHEN 50 THEN 'waiting'
        WHEN 60 THEN 'running' ELSE 'paid' END,
    'slack:T01TEST/UR' || n %% 5000,
    ARRAY['UA' || n %% 2000, 'UA' || n * 7 %% 2000] || CASE WHEN n %% 1000 < 100 THEN ARRAY['U09BUSY'] ELSE '{}' END
        || CASE WHEN n %% 3 = 0 THEN ARRAY['S0GROUP' || n %% 50] ELSE '{}' END,
    now() - n * interval '365 days' / %(count)s
    FROM generate_series(1, %(count)s) AS n"""

# Over the same year; and the newest of everybody's, so that whoever lists those lists the same.
_OURS = """
INSERT INTO wanted
SELECT -n, kind || '-' || n, status, requested_by, approvers,
    now() - n * spread / most
    FROM (VALUES
        ('few', 'waiting', 12, 'cli:ann', ARRAY['U01ALICE'], interval '365 days'),
        ('few-decided', 'paid', 12, 'cli:ann', ARRAY['U01ALICE'], '365 days'),
        ('few-filed', 'paid', 12, 'slack:T01TEST/U01ALICE', ARRAY['UA1'], '365 days'),
        ('busy', 'waiting', 150, 'cli:ann', ARRAY['U09BUSY', 'S0GROUP1'], '365 days'),
        ('busy-decided', 'paid', 150, 'cli:ann', ARRAY['U09BUSY'], '365 days'),
        ('due', 'running', %(due)s, 'cli:ann', NULL, '365 days'),
        ('over', 'paid', 5, 'cli:ann', ARRAY['UA2'], '365 days'),
        ('newest', 'paid', 60, 'cli:ann', ARRAY['UA3'], '20 seconds'),
        ('newest-waits', 'waiting', 60, 'cli:ann', ARRAY['UA3'], '20 seconds')
    ) AS kinds (kind, status, most, requested_by, approvers, spread), generate_series(1, most) AS n"""

_ROWS: tuple[LiteralString, ...] = (
    """
INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, status, due_at, created_at, ended_at)
SELECT thread_id, %(flow)s, %(version)s,
    jsonb_build_object('amount', '250.00', 'currency', 'USD', 'payee', 'Payee ' || number, 'note', 'three chairs'),
    requested_by, status,
    CASE WHEN status = 'running' THEN
        CASE requested_by WHEN 'cli:ann' THEN filed_at ELSE now() + interval '1 day' END END,
    filed_at,
    CASE WHEN status NOT IN ('running', 'waiting') THEN filed_at + interval '1 hour' END
    FROM wanted ORDER BY number DESC""",
    """
INSERT INTO approvals (interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers, required, rank,
    status, requested_at, expires_at, settled_at, expires_after_s, remind_every_s, remind_at)
SELECT md5(thread_id), thread_id, 'approval',
    jsonb_build_object('amount', '250.00', 'currency', 'USD', 'payee', 'Payee ' || number),
    encode(sha256(thread_id::bytea), 'hex'), requested_by, approvers, 1, 0,
    CASE status WHEN 'paid' THEN 'approved' WHEN 'waiting' THEN 'pending' ELSE status END, filed_at,
    now() + interval '30 days', CASE WHEN status <> 'waiting' THEN filed_at + interval '1 hour' END, 86400, 86400,
    now() + interval '1 day'
    FROM wanted WHERE status <> 'running' ORDER BY number DESC""",
    """
INSERT INTO decisions (interrupt_id, person, person_name, verdict, door, decided_at, listed_as)
SELECT md5(thread_id), 'slack:T01TEST/' || approvers[1], approvers[1],
    CASE status WHEN 'paid' THEN 'approve' ELSE 'reject' END, 'slack', filed_at + interval '1 hour', approvers[1]
    FROM wanted WHERE status IN ('paid', 'rejected') ORDER BY number DESC""",
    """
INSERT INTO payments (thread_id, amount, currency, payee, provider, reference, status, paid_at)
SELECT thread_id, 250, 'USD', 'Payee ' || number, 'ledger', 'pay-' || thread_id, 'paid', filed_at + interval '1 hour'
    FROM wanted WHERE status = 'paid' ORDER BY number DESC""",
    """
INSERT INTO notices (kind, interrupt_id, thread_id, version, status, attempt, due_at)
SELECT kind, md5(thread_id), thread_id, 1, 'sent', 1, NULL FROM wanted, unnest(ARRAY['card', 'reply']) AS kind
    WHERE status <> 'running' AND (kind = 'card' OR status <> 'waiting') ORDER BY number DESC""",
    """
INSERT INTO messages (channel, ts, interrupt_id, posted_at)
SELECT 'C01BENCH', 1500000000 + row_number() OVER (ORDER BY number DESC) || '.000100', md5(thread_id), filed_at
    FROM wanted WHERE status <> 'running' ORDER BY number DESC""",
    """
INSERT INTO audit (at, kind, thread_id, interrupt_id, who, door, shown, data)
SELECT filed_at + CASE WHEN kind LIKE '%%ed' THEN interval '0' ELSE interval '1 hour' END, kind, thread_id,
    CASE WHEN kind LIKE 'approval.%%' THEN md5(thread_id) END, requested_by, 'cli',
    CASE WHEN kind LIKE 'approval.%%' THEN encode(sha256(thread_id::bytea), 'hex') END,
    jsonb_build_object('tier', 'approval', 'status', status)
    FROM wanted, unnest(CASE status WHEN 'running' THEN ARRAY['thread.started']
        WHEN 'waiting' THEN ARRAY['thread.started', 'approval.requested']
        WHEN 'expired' THEN ARRAY['thread.started', 'approval.requested', 'approval.expired']
        ELSE ARRAY['thread.started', 'approval.requested', 'approval.voted', 'approval.decided'] END) AS kind
    ORDER BY number DESC""",
    """
INSERT INTO audit_seals (position, audit_id, sha256)
SELECT row_number() OVER (ORDER BY id), id, sha256(id::text::bytea) FROM audit""",
    """
UPDATE audit_head SET (position, sha256) = (SELECT position, sha256 FROM audit_seals ORDER BY position DESC LIMIT 1)""",
    # Kept for a month.
    """
INSERT INTO events (type, thread_id, interrupt_id, data, created_at, position)
SELECT type, thread_id, md5(thread_id), jsonb_build_object('thread', thread_id, 'status', status), filed_at,
    nextval('events_position')
    FROM (SELECT * FROM wanted, unnest(ARRAY['approval.requested', 'approval.voted', 'approval.decided']) AS type
        WHERE status = 'paid' AND filed_at > now() - interval '30 days' ORDER BY number DESC) AS happened""",
    """
INSERT INTO webhook_endpoints (name, position) SELECT 'acme', max(position) FROM events""",
    """
INSERT INTO webhook_deliveries (endpoint, event_id, status, attempt, due_at, sent_at)
SELECT 'acme', id, 'sent', 1, NULL, created_at FROM events ORDER BY id""",
    """
INSERT INTO links (interrupt_id, person, tokens_sha256, made_by, made_at, mailed_at, revoked_at)
SELECT md5(thread_id), 'mail:a' || number %% 2000 || '@example.com', ARRAY[sha256(thread_id::bytea)], 'policy',
    filed_at, filed_at, CASE WHEN status <> 'waiting' THEN filed_at + interval '1 hour' END
    FROM wanted WHERE status <> 'running' AND number %% 20 IN (0, 10) ORDER BY number DESC""",
    """
INSERT INTO advice (thread_id, status, summary, model, asked_at)
SELECT thread_id, 'given', 'Nothing stands out.', 'gpt-5-mini', filed_at FROM wanted WHERE number %% 4 = 0
    ORDER BY number DESC""",
    """
INSERT INTO effects (thread_id, key, name, fingerprint, status, lease_until, result, started_at, ended_at)
SELECT thread_id, 'auto:' || md5(thread_id), 'some.call', md5(thread_id), 'done', filed_at, 'null', filed_at, filed_at
    FROM wanted WHERE number %% 20 = 3 ORDER BY number DESC""",
    """
INSERT INTO receipts (door, sender, key, body_sha256, status, answer, received_at)
SELECT 'api', 'robot', thread_id, sha256(thread_id::bytea), 200, '{}', filed_at
    FROM wanted WHERE filed_at > now() - interval '30 days' ORDER BY number DESC""",
    # Kept for a week.
    """
INSERT INTO checkpoints (thread_id, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata)
SELECT thread_id, lpad(step::text, 36, '0'), lpad((step - 1)::text, 36, '0'), NULL,
    jsonb_build_object('v', 4, 'id', step, 'channel_values', jsonb_build_object('thread_id', thread_id)),
    jsonb_build_object('step', step)
    FROM wanted, generate_series(1, 6) AS step WHERE filed_at > now() - interval '7 days' AND status <> 'running'""",
    """
INSERT INTO checkpoint_blobs (thread_id, channel, version, type, blob)
SELECT thread_id, 'tiers', step::text, 'msgpack', sha256(thread_id::bytea)
    FROM wanted, generate_series(1, 3) AS step WHERE filed_at > now() - interval '7 days' AND status <> 'running'""",
    """
INSERT INTO checkpoint_writes (thread_id, checkpoint_id, task_id, idx, channel, type, blob, task_path)
SELECT thread_id, lpad(step::text, 36, '0'), step::text, step, 'tiers', 'msgpack', sha256(thread_id::bytea), ''
    FROM wanted, generate_series(1, 6) AS step WHERE filed_at > now() - interval '7 days' AND status <> 'running'""",
)

# What no key needs: made at the end, it takes a third of the time.
_INDEXES = """
SELECT format('DROP INDEX %s', i.indexrelid::regclass) AS dropped, pg_get_indexdef(i.indexrelid) AS made
    FROM pg_index i JOIN pg_stat_user_tables t ON t.relid = i.indrelid
    WHERE NOT EXISTS (SELECT FROM pg_constraint c WHERE c.conindid = i.indexrelid)"""


async def seed(conn: Connection, count: int) -> None:
    """What those people see, and so many threads of others."""
    values = {"count": count, "due": DUE, "flow": CLAIM_FLOW, "version": CLAIM_FLOW_VERSION}
    async with conn.transaction():
        await conn.execute("SET LOCAL session_replication_role = replica")
        # What approves must be whole.
        await conn.execute("ALTER TABLE approvals ENABLE ALWAYS TRIGGER approvals_fingerprint")
        await conn.execute("SET LOCAL maintenance_work_mem = '256MB'")
        await conn.execute(_WANTED)
        indexes = await (await conn.execute(_INDEXES)).fetchall()
        for index in indexes:
            await conn.execute(index["dropped"])
        for statement in (_OURS, *([_OTHERS] if count else []), *_ROWS):
            await conn.execute(statement, values, prepare=False)
        for index in indexes:
            await conn.execute(index["made"])
        await conn.execute("ALTER TABLE approvals ENABLE TRIGGER approvals_fingerprint")
        await conn.execute("DROP TABLE wanted")
    await conn.execute("VACUUM ANALYZE")
    # All of it is sealed; and of a table that is empty most of the time the database often knows nothing.
    await conn.execute("TRUNCATE audit_unsealed")
