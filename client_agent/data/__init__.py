"""A site's images: found, decoded, matched to the plan's classes, and ready for training."""
