-- Spreads LangGraph's checkpoints, half of what a thread writes, over the workers of a Citus cluster by thread
-- id: see docs/scaling.md, also for why the other tables stay on the coordinator.
--
--     psql --single-transaction --set=ON_ERROR_STOP=1 --file=deploy/citus.sql "$DATABASE_URL"
--
-- On the coordinator, as the owner of the tables, after `setup` and while nothing of claim-flow runs.

CREATE EXTENSION IF NOT EXISTS citus;

SELECT create_distributed_table('checkpoints', 'thread_id');
-- The same threads in the same places: a checkpoint is read with its values and its writes, in one statement.
SELECT create_distributed_table('checkpoint_blobs', 'thread_id', colocate_with => 'checkpoints');
SELECT create_distributed_table('checkpoint_writes', 'thread_id', colocate_with => 'checkpoints');
