"""What reads the formats: one pass over a message, JSON, XML parameters and Python literals."""
