"""What every program needs from its machine: a command line, secrets, durable files."""
