"""The program `flwr-clientapp` that a SuperNode with warm clients starts for every message.

It is copied into the folder of the warm clients and runs with `python -IS`: it may use the standard library only, and
as little of it as possible, because its imports are part of every message. It hands its arguments, folder, environment
and standard files to the resident process, and ends as the forked child does. If there is any doubt, it runs the real
program and reports why.
"""

import os
import signal
import socket
import sys

PROTOCOL = b"equipoise-warm-1"
FOLDER = ""  # both are filled in when the file is copied
COMMAND = ""
PATIENCE = 10.0  # seconds to wait for a resident process that is still importing; a token of Flower lives for 30
NOTES = "cold"
"""Name of the file in which reasons for a cold start are collected for the operator."""
MOST_NOTES = 1 << 16  # bytes
UNKNOWN = 70  # exit code if the child and the resident process both disappeared


class Cold(Exception):
    """Why the real program has to be run."""


def real_command() -> str | None:
    """Return the path of the real program: the first on the PATH that is not in the shim's own folder."""
    own = os.path.realpath(os.path.join(FOLDER, "bin"))
    for entry in os.environ.get("PATH", "").split(os.pathsep):
        path = os.path.join(entry, COMMAND)
        if entry and os.path.realpath(entry) != own and os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None


def private(path: str, allowed: int) -> None:
    """Refuse a file or folder of another user, or one that other users may open."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise Cold(f"{path}: {error.strerror}; the resident process is not running") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o777 & ~allowed:
        raise Cold(f"{path} must belong to this user, with permissions {allowed:o}")


def connect() -> socket.socket:
    """Connect to the resident process of the same user."""
    private(FOLDER, 0o700)
    private(os.path.join(FOLDER, "socket"), 0o600)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE)
    folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{folder}/socket")  # because the path of a socket may have 107 bytes only
    except OSError as error:
        raise Cold(f"the resident process is not running ({error.strerror or error})") from None
    finally:
        os.close(folder)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if int.from_bytes(credentials[4:8], sys.byteorder) != os.getuid():
        raise Cold("the socket belongs to a process of another user")
    return connection


def line(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Read one line and the file descriptors that come with it; an empty line is the end."""
    text = b""
    found: list[int] = []
    while not text.endswith(b"\n"):
        piece, received, _, _ = socket.recv_fds(connection, 1, 1)
        found += received
        if not piece or len(text) > 4096:
            return b"", found
        text += piece
    return text[:-1], found


def hand_over(connection: socket.socket, real: str) -> int:
    """Send what the child needs; nothing has been run while this raises Cold."""
    try:
        hello, _ = line(connection)
    except OSError as error:
        raise Cold(f"the resident process does not answer ({error})") from None
    if hello != PROTOCOL:
        word, _, reason = hello.partition(b" ")
        other = "the resident process is of another version, or has just ended"
        raise Cold(reason.decode(errors="replace") if word == b"cold" else other)
    umask = os.umask(0o077)
    os.umask(umask)
    facts = os.stat(real)
    program = f"{facts.st_mtime_ns} {facts.st_size} {facts.st_ino}"
    arguments = [os.fsencode(argument) for argument in sys.argv[1:]]
    environment = [name + b"=" + value for name, value in os.environb.items()]
    fields = [b"%d" % umask, os.fsencode(real), program.encode(), b"%d" % len(arguments), *arguments, *environment]
    body = b"\0".join(fields)
    files = [os.dup(number) for number in (0, 1, 2)]
    files.append(os.open(".", os.O_RDONLY | os.O_DIRECTORY))
    try:
        socket.send_fds(connection, [len(body).to_bytes(8, "big")], files)
        connection.sendall(body)
        connection.settimeout(None)  # from here on the child may run, so only the end of the connection ends the wait
        word, found = line(connection)
    except OSError as error:
        raise Cold(f"the resident process broke off ({error})") from None
    for number in files:
        os.close(number)
    if word != b"started" or not found:
        kind, _, reason = word.partition(b" ")
        other = "the child of the resident process ended before it started"
        raise Cold(reason.decode(errors="replace") if kind == b"cold" else other)
    return found[0]


def wait(connection: socket.socket, child: int) -> None:
    """Pass signals on to the child, and end as it ends."""

    def forward(number: int, _: object) -> None:
        try:
            signal.pidfd_send_signal(child, number)
        except OSError:
            return  # it has ended, and the end of the connection tells how

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, forward)
    try:
        word, _, value = line(connection)[0].partition(b" ")
    except OSError:
        word, value = b"", b""
    if word == b"exit":
        os._exit(int(value))
    if word == b"signal":
        if int(value) != signal.SIGKILL:
            signal.signal(int(value), signal.SIG_DFL)
        os.kill(os.getpid(), int(value))
    os._exit(UNKNOWN)


def report(reason: str) -> None:
    """Write why the client runs cold to the SuperNode's log, and for the operator of a local deployment."""
    try:
        say(f"this client runs cold, slower but with the same results: {reason}")
        private(FOLDER, 0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = os.open(os.path.join(FOLDER, NOTES), flags, 0o600)
        if os.fstat(file).st_size < MOST_NOTES:
            os.write(file, reason.replace("\n", " ").encode(errors="replace") + b"\n")
    except (OSError, Cold):
        pass


def say(text: str) -> None:
    """Write a line to standard error."""
    os.write(2, f"equipoise: {text}\n".encode(errors="replace"))


def open_standard_files() -> None:
    """Open standard files that are closed, so that no other file takes their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def main() -> None:
    """Run the client in a child of the resident process, or else run the real program."""
    open_standard_files()
    real = real_command()
    if real is None:
        say(f"there is no program {COMMAND} on the PATH after {FOLDER}/bin")
        sys.exit(127)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # it ends the connection, and with it a child that there is
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        connection = connect()
        child = hand_over(connection, real)
    except Cold as cold:
        report(str(cold))
    except Exception as error:  # whatever is wrong here must not cost a message
        report(f"{type(error).__name__}: {error}")
    else:
        wait(connection, child)
    os.execv(real, [real, *sys.argv[1:]])


if __name__ == "__main__":
    main()
