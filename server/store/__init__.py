"""SQL on SQLite and PostgreSQL alike: tables, transactions, blobs, and the schema version."""
