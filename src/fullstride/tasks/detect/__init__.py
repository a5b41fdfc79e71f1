"""The task of detection, its two heads and its scores."""
