"""The model that the site serves: measured, chosen, exported, and the queue in front of it."""
