"""Text from elsewhere, made safe for files and JSON."""


def truncate_and_escape(text: str, limit: int = 2000) -> str:
    """Return at most `limit` characters, with escapes for what UTF-8 cannot encode (such as Latin-1 file names)."""
    return text[:limit].encode("utf-8", "backslashreplace").decode()[:limit]
