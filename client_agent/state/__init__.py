"""The durable state folder: identity, private tensors, pending uploads, kept models, and the gate's decisions."""
