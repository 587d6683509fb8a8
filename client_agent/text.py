"""Text from elsewhere, made fit for files and answers."""


def storable(text: str, most: int = 2000) -> str:
    """Bound a text, and escape what UTF-8 cannot hold, such as the bytes of a file name in another encoding."""
    return text[:most].encode("utf-8", "backslashreplace").decode()
