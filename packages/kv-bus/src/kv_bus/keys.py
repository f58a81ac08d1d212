"""Who is who: each node's CURVE key pair, and the cluster's list of the keys it admits.

It decides where keys lie, who may read them and which node a key belongs to. It knows no socket.

K1: a secret never appears in a `repr`, a log line, an error or an exception chain.
K2: a key folder or key file that others can read is refused, not repaired: it may have been read already.
K3: a key belongs to one node and a node has one key; a list that says otherwise is refused whole.
K4: a list that turns bad while the process runs changes nothing: the last good one stays, the fault is reported.
    A list that names fewer keys than before takes effect at the next look.

Files are TOML. A key pair lies in `<folder>/<node_id>.key` (folder 0700, file 0600); the list is one file for the
cluster, equal on every node:

    cluster = "demo"
    [nodes]
    "prefill-1" = "<public key in Z85>"
"""

import logging
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import zmq
import zmq.utils.z85

from kv_bus.errors import AllowListError, KeyFileError
from kv_bus.limits import ALLOW_LIST_BYTES_MAX
from kv_core.ids import NodeId
from kv_core.limits import MAX_NAME_BYTES

_log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def is_valid_name(name: str) -> bool:
    """Whether `name` can be a node's or cluster's: letters, digits, `.`, `_`, `-`, not led by a sign.

    It becomes a file name, a TOML key and a ZAP user id.
    """
    return len(name) <= MAX_NAME_BYTES - len(".key") and _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A node's CURVE keys in Z85 (40 characters each)."""

    node_id: NodeId
    public_key: str
    secret_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class AllowList:
    """The keys that a cluster admits.

    Raises:
        AllowListError: a bad name, a bad key, or one key for two nodes (K3).
    """

    cluster: str
    keys: Mapping[NodeId, str]
    owners: Mapping[str, NodeId] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not is_valid_name(self.cluster):
            raise AllowListError(path="allow-list", cause=f"cluster name {self.cluster!r} is not allowed")
        owners: dict[str, NodeId] = {}
        for node_id, key in self.keys.items():
            if not is_valid_name(node_id):
                raise AllowListError(path="allow-list", cause=f"node name {node_id!r} is not allowed")
            if not _Z85.fullmatch(key):
                raise AllowListError(path="allow-list", cause=f"the key of {node_id} is not 40 characters of Z85")
            if owners.setdefault(key, node_id) != node_id:
                raise AllowListError(path="allow-list", cause=f"{owners[key]} and {node_id} have the same key")
        object.__setattr__(self, "owners", owners)


class AllowListSource(Protocol):
    """Where a bus looks its peers' keys up."""

    @property
    def current(self) -> AllowList: ...

    def refresh(self) -> bool:
        """Look for a newer list; True when `current` changed."""
        ...


class FixedAllowList:
    """A list that never changes."""

    __slots__ = ("current",)

    def __init__(self, current: AllowList) -> None:
        self.current = current

    def refresh(self) -> bool:
        return False


class AllowListFile:
    """The list in a file, read again when the file changes (K4).

    Raises:
        AllowListError: at construction, when there is no good list to begin with.
    """

    __slots__ = ("_seen", "current", "failures", "last_failure", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = 0
        self.last_failure = ""
        self._seen = self._signature()
        self.current = read_allow_list(path)

    def refresh(self) -> bool:
        seen = self._signature()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            fresh = read_allow_list(self.path)
        except AllowListError as error:
            self.failures += 1
            self.last_failure = str(error)
            _log.error("allow-list kept as it was, its file is bad: %s", error)
            return False
        changed = fresh != self.current
        self.current = fresh
        if changed:
            _log.info("allow-list read again path=%s nodes=%d", self.path, len(fresh.keys))
        return changed

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def generate_key_pair(node_id: NodeId) -> KeyPair:
    """A new key pair from the system's randomness."""
    if not is_valid_name(node_id):
        raise KeyFileError(path="key pair", cause=f"node name {node_id!r} is not allowed")
    public, secret = zmq.curve_keypair()
    return KeyPair(node_id, public.decode(), secret.decode())


def create_key_pair(folder: Path, node_id: NodeId) -> KeyPair:
    """Make a key pair and keep it in `folder`, which is made when missing.

    Raises:
        KeyFileError: the node has a key already (it is never overwritten), or the folder is open to others.
    """
    pair = generate_key_pair(node_id)
    _make_folder(folder)
    path = key_path(folder, node_id)
    text = (
        "# CURVE key pair of one node. Whoever reads the secret can act as this node.\n"
        f'node_id = "{pair.node_id}"\npublic_key = "{pair.public_key}"\nsecret_key = "{pair.secret_key}"\n'
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise KeyFileError(path=str(path), cause="exists already and is not overwritten") from None
    except OSError as error:
        raise KeyFileError(path=str(path), cause=_reason(error)) from None
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    return pair


def load_key_pair(folder: Path, node_id: NodeId) -> KeyPair:
    """The key pair of `node_id` from `folder`.

    Raises:
        KeyFileError: missing, malformed, another node's, or readable by others (K2).
    """
    _check_folder(folder)
    path = key_path(folder, node_id)
    table = _read_toml(path, private=True)
    values = {name: table.get(name) for name in ("node_id", "public_key", "secret_key")}
    if set(table) != set(values) or not all(isinstance(value, str) for value in values.values()):
        raise KeyFileError(path=str(path), cause="must hold node_id, public_key and secret_key, nothing else")
    public, secret = str(values["public_key"]), str(values["secret_key"])
    if values["node_id"] != node_id:
        raise KeyFileError(path=str(path), cause=f"is the key of {values['node_id']!r}, not of {node_id!r}")
    if not _Z85.fullmatch(public) or not _Z85.fullmatch(secret):
        raise KeyFileError(path=str(path), cause="a key is not 40 characters of Z85")
    if zmq.curve_public(secret.encode()).decode() != public:
        raise KeyFileError(path=str(path), cause="the public key does not belong to the secret one")
    return KeyPair(node_id, public, secret)


def key_path(folder: Path, node_id: NodeId) -> Path:
    """Where the key pair of `node_id` lies."""
    if not is_valid_name(node_id):
        raise KeyFileError(path=str(folder), cause=f"node name {node_id!r} is not allowed")
    return folder / f"{node_id}.key"


def write_allow_list(path: Path, allow_list: AllowList) -> None:
    """Write the list so that a reader sees the old or the new one, never a part.

    Raises:
        AllowListError: the file cannot be written.
    """
    lines = [
        "# The nodes of one cluster and their public keys; equal on every node, read again when it changes.",
        f'cluster = "{allow_list.cluster}"',
        "",
        "[nodes]",
        *(f'"{node_id}" = "{key}"' for node_id, key in allow_list.keys.items()),
        "",
    ]
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o644)
            file.write("\n".join(lines))
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise AllowListError(path=str(path), cause=_reason(error)) from None


def read_allow_list(path: Path) -> AllowList:
    """The list in `path`.

    Raises:
        AllowListError: missing, malformed, contradicting itself (K3), or writable by others.
    """
    try:
        table = _read_toml(path, private=False)
    except KeyFileError as error:
        raise AllowListError(**error.fields) from None
    cluster, nodes = table.get("cluster"), table.get("nodes")
    if set(table) != {"cluster", "nodes"} or not isinstance(cluster, str) or not isinstance(nodes, dict):
        raise AllowListError(path=str(path), cause='must hold cluster = "..." and a table [nodes], nothing else')
    if not all(isinstance(key, str) for key in nodes.values()):
        raise AllowListError(path=str(path), cause="every entry of [nodes] is a name and a public key")
    try:
        return AllowList(cluster, {NodeId(name): str(key) for name, key in nodes.items()})
    except AllowListError as error:
        raise AllowListError(path=str(path), cause=error.fields["cause"]) from None


def fingerprint(public_key: str) -> str:
    """A few characters of a public key, for logs."""
    return public_key[:8]


def _read_toml(path: Path, *, private: bool) -> dict[str, object]:
    forbidden = 0o077 if private else 0o022
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise KeyFileError(path=str(path), cause="is not a file")
            _check_access(path, found, forbidden)
            if found.st_size > ALLOW_LIST_BYTES_MAX:
                raise KeyFileError(path=str(path), cause=f"is larger than {ALLOW_LIST_BYTES_MAX} bytes")
            text = file.read(ALLOW_LIST_BYTES_MAX)
        return tomllib.loads(text.decode())
    except OSError as error:
        raise KeyFileError(path=str(path), cause=_reason(error)) from None
    except UnicodeDecodeError:
        raise KeyFileError(path=str(path), cause="is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        # Its text names a position and a character, never a value (K1).
        raise KeyFileError(path=str(path), cause=f"is not TOML: {error}") from None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KeyFileError(path=str(folder), cause=_reason(error)) from None
    _check_folder(folder)


def _check_folder(folder: Path) -> None:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise KeyFileError(path=str(folder), cause=_reason(error)) from None
    if not stat.S_ISDIR(found.st_mode):
        raise KeyFileError(path=str(folder), cause="is not a folder")
    _check_access(folder, found, 0o077)


def _check_access(path: Path, found: os.stat_result, forbidden: int) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise KeyFileError(path=str(path), cause=f"belongs to user {found.st_uid}, not to this process's user")
    if found.st_mode & forbidden:
        allowed = "0700" if stat.S_ISDIR(found.st_mode) else "0600" if forbidden & 0o044 else "0644"
        mode = stat.S_IMODE(found.st_mode)
        raise KeyFileError(path=str(path), cause=f"has mode {mode:04o}, at most {allowed} is accepted")


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
