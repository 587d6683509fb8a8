"""Everything around the application: the process, its sockets, its background threads, and middleware."""
