-- Splits the tables whose every key holds the thread id into 16 partitions by it: see docs/scaling.md.
--
--     psql --single-transaction --set=ON_ERROR_STOP=1 --file=deploy/partitions.sql "$DATABASE_URL"
--
-- As the owner of the tables, while nothing of claim-flow runs. Safe to repeat: what is partitioned stays as it is.

CREATE OR REPLACE FUNCTION pg_temp.partition_by_thread(name text, partitions integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    plain regclass := name::regclass;
    -- Everything of it has its name again: later migrations know keys, indexes and triggers by theirs.
    again text[];
    options text;
    statement text;
BEGIN
    IF (SELECT relkind = 'p' FROM pg_class WHERE oid = plain) THEN
        RETURN;
    END IF;
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', plain);
    again := ARRAY(
            SELECT format('ALTER TABLE %s OWNER TO %I', name, pg_get_userbyid(relowner)) FROM pg_class WHERE oid = plain
        ) || ARRAY(
            SELECT format('GRANT %s ON %s TO %s', privilege_type, name,
                CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END)
            FROM pg_class, aclexplode(relacl) WHERE oid = plain
        ) || ARRAY(
            SELECT format('ALTER TABLE %s ADD CONSTRAINT %I %s', name, conname, pg_get_constraintdef(oid))
            FROM pg_constraint WHERE conrelid = plain AND contype IN ('p', 'u')
        ) || ARRAY(
            SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = plain
            AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid AND conrelid = plain)
        ) || ARRAY(
            SELECT format('ALTER TABLE %s ADD CONSTRAINT %I %s', conrelid::regclass, conname, pg_get_constraintdef(oid))
            FROM pg_constraint WHERE contype = 'f' AND plain IN (conrelid, confrelid) AND conparentid = 0
        ) || ARRAY(
            SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = plain AND NOT tgisinternal
        );
    -- Of each partition: a table that is partitioned has none of its own.
    options := (
        SELECT 'WITH (' || string_agg(option, ', ') || ')' FROM (
            SELECT unnest(reloptions) FROM pg_class WHERE oid = plain
            UNION ALL
            SELECT 'toast.' || unnest(t.reloptions) FROM pg_class c JOIN pg_class t ON t.oid = c.reltoastrelid
            WHERE c.oid = plain
        ) AS given (option)
    );
    FOR statement IN SELECT format('ALTER TABLE %s DROP CONSTRAINT %I', conrelid::regclass, conname)
        FROM pg_constraint WHERE contype = 'f' AND confrelid = plain AND conparentid = 0
    LOOP
        EXECUTE statement;
    END LOOP;
    EXECUTE format('ALTER TABLE %I RENAME TO %I', name, name || '_plain');
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL EXCLUDING INDEXES EXCLUDING STATISTICS)'
        ' PARTITION BY HASH (thread_id)', name, name || '_plain');
    FOR remainder IN 0 .. partitions - 1 LOOP
        EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES WITH (MODULUS %s, REMAINDER %s) %s',
            name || '_p' || remainder, name, partitions, remainder, options);
    END LOOP;
    EXECUTE format('INSERT INTO %I SELECT * FROM %I', name, name || '_plain');
    EXECUTE format('DROP TABLE %I', name || '_plain');
    FOREACH statement IN ARRAY again LOOP
        EXECUTE statement;
    END LOOP;
    EXECUTE format('ANALYZE %I', name);
END $$;

SELECT pg_temp.partition_by_thread(name, 16)
FROM unnest(ARRAY['threads', 'effects', 'advice', 'checkpoints', 'checkpoint_blobs', 'checkpoint_writes']) AS name;
