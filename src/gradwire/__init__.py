"""gradwire."""

