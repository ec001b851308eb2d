-- What few operations have beside their columns: probes, kept arguments, a receipt. One JSON object.
ALTER TABLE operation ADD COLUMN extra TEXT;

-- What is in doubt is looked for among millions that are not.
CREATE INDEX operation_in_doubt ON operation (created_at_us, operation_id) WHERE state IN ('UNKNOWN', 'MANUAL');
