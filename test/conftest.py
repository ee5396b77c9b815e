"""What holds for all tests."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background jobs of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests, and what they start, interrupt
