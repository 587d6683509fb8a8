"""The site's web service: `/predict`, `/info`, health and metrics."""
