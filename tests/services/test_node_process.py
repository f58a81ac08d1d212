"""Where a node's sockets lie: paths that fit into a socket address, and never two nodes in one folder."""

from pathlib import Path

from kv_services.node.process import SOCKET_NAME_MAX, SOCKET_PATH_MAX, socket_folder


def test_sockets_lie_with_the_state_when_the_path_is_short_enough() -> None:
    assert socket_folder(Path("/srv/kv/state"), "decode-1") == Path("/srv/kv/state/sockets/decode-1")


def test_a_deep_state_folder_gets_a_short_place_of_its_own_for_its_sockets() -> None:
    deep = Path("/" + "/".join(["folder"] * 20))
    folders = {socket_folder(deep, node) for node in ("decode-1", "decode-2")}
    folders |= {socket_folder(deep / "other", "decode-1")}
    assert len(folders) == 3
    assert all(len(str(folder)) + SOCKET_NAME_MAX <= SOCKET_PATH_MAX for folder in folders)
    assert socket_folder(deep, "decode-1") in folders
