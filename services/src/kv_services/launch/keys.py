"""Key pairs of a cluster's processes and the list that admits them, where the processes look for them."""

from collections.abc import Iterable

from kv_bus.keys import AllowList, create_key_pair, key_path, load_key_pair, read_allow_list, write_allow_list
from kv_core.ids import NodeId
from kv_services.config import ClusterConfig


def write_keys(config: ClusterConfig, node_ids: Iterable[str] | None = None) -> AllowList:
    """Make the key pairs that are missing, then write the list of all keys of the file's nodes.

    Key pairs that exist are kept. A node whose pair is not in this folder (it may lie on another machine) keeps the
    entry it has in the list; one that is no longer in the file loses it, unless etcd may list nodes of no file.

    Args:
        config: the cluster; the keys lie in its `keys_path`.
        node_ids: nodes to make key pairs for; all of the file when None.

    Raises:
        KeyFileError: a key or its folder is broken, or others can read it.
        AllowListError: the list there is cannot be read.
        ConfigError: `node_ids` names an unknown node.
    """
    folder = config.keys_path
    wanted = [config.node(node_id).node_id for node_id in node_ids] if node_ids is not None else None
    listed = read_allow_list(config.allow_list_path).keys if config.allow_list_path.exists() else {}
    keys: dict[NodeId, str] = dict(listed) if config.cluster.discovery == "etcd" else {}
    for node in config.nodes:
        if key_path(folder, node.node_id).exists():
            keys[node.node_id] = load_key_pair(folder, node.node_id).public_key
        elif wanted is None or node.node_id in wanted:
            keys[node.node_id] = create_key_pair(folder, node.node_id).public_key
        elif node.node_id in listed:
            keys[node.node_id] = listed[node.node_id]
    allow_list = AllowList(config.cluster.name, keys)
    write_allow_list(config.allow_list_path, allow_list)
    return allow_list
