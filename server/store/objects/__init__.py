"""Places outside the database for the bytes of blobs: a bucket of an S3-compatible store, or a folder."""
