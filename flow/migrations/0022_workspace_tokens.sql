-- No token of Slack's is kept as it is: see flow/cipher.py.
ALTER TABLE workspaces ADD CHECK (token !~ '^xox');

-- Installations that a browser has come back from: a state is good for one. See bot/install.py.
CREATE TABLE install_states (
    sha256  bytea PRIMARY KEY,
    used_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
