"""Fakes of services on loopback, with the wire format of the originals and failures on demand."""
