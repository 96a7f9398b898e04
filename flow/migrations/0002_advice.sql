-- What the language model said of a claim: asked for at most once per thread.
CREATE TABLE advice (
    thread_id         text COLLATE "C" PRIMARY KEY REFERENCES threads,
    -- asked: committed before the call, so that a killed drive never asks twice.
    status            text NOT NULL CHECK (status IN ('asked', 'given', 'unavailable')),
    summary           text NOT NULL DEFAULT '',
    risks             text[] NOT NULL DEFAULT '{}',
    needs_review      boolean NOT NULL DEFAULT false,
    -- Why there is none.
    reason            text,
    model             text NOT NULL,
    prompt_tokens     integer,
    completion_tokens integer,
    latency_ms        integer,
    asked_at          timestamptz NOT NULL DEFAULT clock_timestamp()
);
