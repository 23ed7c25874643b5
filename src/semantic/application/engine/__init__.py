"""The device's thread: many requests, one device."""
