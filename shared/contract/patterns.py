"""Regular expressions for text in plans and messages; `validation_messages` describes each one to people."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
PRINTABLE_PATTERN = r"^[\x20-\x7e]*$"
DIGEST_PATTERN = r"^[0-9a-f]{64}$"
ATTEMPT_PATTERN = r"^[0-9a-f]{32}$"
ONE_LINE_PATTERN = r"^[^\x00-\x1f\x7f]*$"
IMPORT_PATH_PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
