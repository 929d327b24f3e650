"""The optional event trigger that reports changes of the schema in the stream.

Event triggers belong to superusers, so Moored never creates one: an administrator reads the
statements, and runs them.
"""

from __future__ import annotations

from ..decode import SCHEMA_SIGNAL

__all__ = ["DROP_SCHEMA_TRIGGER", "SCHEMA_TRIGGER"]

#: The statements that create the trigger. It writes about 100 bytes of WAL for each statement that
#: defines a table or a publication, except temporary tables, and can make none of these fail.
SCHEMA_TRIGGER = f"""\
CREATE SCHEMA IF NOT EXISTS moored;
CREATE OR REPLACE FUNCTION moored.schema_changed() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
  IF (SELECT bool_and(schema_name = 'pg_temp') FROM pg_event_trigger_ddl_commands()) THEN
    RETURN;
  END IF;
  PERFORM pg_logical_emit_message(true, '{SCHEMA_SIGNAL}', '');
EXCEPTION WHEN OTHERS THEN
  NULL;  -- the change of the schema is more important
END $$;
CREATE EVENT TRIGGER moored_schema_changed ON ddl_command_end
WHEN TAG IN ('CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO', 'ALTER TABLE', 'DROP TABLE',
  'ALTER SCHEMA', 'DROP SCHEMA', 'ALTER PUBLICATION', 'DROP PUBLICATION')
EXECUTE FUNCTION moored.schema_changed();
"""
#: The statements that remove it.
DROP_SCHEMA_TRIGGER = """\
DROP EVENT TRIGGER IF EXISTS moored_schema_changed;
DROP FUNCTION IF EXISTS moored.schema_changed();
"""
