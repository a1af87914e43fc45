"""The applications that come with penstock."""
