"""What the coordinator computes with torch, in a process of its own: the coordinator itself never loads it."""
