"""Fakes of remote services, which tests run on this machine; imported as `fakes.docker` and so on."""
