-- Run once by an administrator: the ledger's tables get an owner whom nobody can log in as, and workers use a role that
-- can append to the ledger but never change it. Grant `endstop_app` to the workers' own login roles.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'endstop_owner') THEN
        CREATE ROLE endstop_owner NOLOGIN;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'endstop_app') THEN
        CREATE ROLE endstop_app NOLOGIN;
    END IF;
END
$$;

ALTER SCHEMA endstop OWNER TO endstop_owner;
DO $$
DECLARE
    item record;
BEGIN
    FOR item IN
        SELECT relkind, oid::regclass::text AS name FROM pg_class
        WHERE relnamespace = 'endstop'::regnamespace AND relkind IN ('r', 'v')
    LOOP
        EXECUTE format('ALTER %s %s OWNER TO endstop_owner', CASE item.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, item.name);
    END LOOP;
    FOR item IN SELECT oid::regprocedure::text AS name FROM pg_proc WHERE pronamespace = 'endstop'::regnamespace LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO endstop_owner', item.name);
    END LOOP;
END
$$;

REVOKE ALL ON SCHEMA endstop FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA endstop FROM PUBLIC, endstop_app;
GRANT USAGE ON SCHEMA endstop TO endstop_app;
GRANT SELECT ON ALL TABLES IN SCHEMA endstop TO endstop_app;
GRANT INSERT ON endstop.entry, endstop.place TO endstop_app;
GRANT INSERT, DELETE ON endstop.outbox, endstop.input_digest TO endstop_app;
GRANT INSERT ON endstop.child, endstop.spec TO endstop_app;
GRANT INSERT, UPDATE ON endstop.run, endstop.run_state, endstop.operation, endstop.control TO endstop_app;
GRANT INSERT, UPDATE, DELETE ON endstop.writer, endstop.worker TO endstop_app;
