"""Stand-ins for services, on loopback, that speak their wire format and can be made to fail."""
