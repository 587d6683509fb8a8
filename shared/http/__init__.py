"""What both web services need around their applications: connections, TLS, headers, problems. No routes."""
