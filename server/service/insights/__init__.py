"""What people look at: read-only, with a fixed number of statements each, and bounded whatever the number of rounds."""
