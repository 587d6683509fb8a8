"""SQL: tables, sessions, queries and blobs, on SQLite and PostgreSQL alike."""
