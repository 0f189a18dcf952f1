"""Dense attention as a selector: every visible key."""
