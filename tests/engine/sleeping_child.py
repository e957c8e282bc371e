"""A child process that sleeps until it may exit, or for ever if it was told to be "deaf"."""

import threading

from jaxserve import processes

if __name__ == "__main__":
    message, life_fd = processes.become_child()
    if message != b"deaf":
        processes.exit_with_parent(life_fd, "sleeper")
    threading.Event().wait()
