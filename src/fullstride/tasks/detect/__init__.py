"""Where is which object? The task of detection."""
