"""What scripts of several kinds share."""
