"""The agent's page for people: its status, what it serves and how well, and a place to try images."""
