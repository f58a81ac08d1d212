"""The faults of what holds and computes sequences in pieces: plans, workers, coordinators, joined attention."""

from typing import Final

from tests.mutants.mutant import Mutant

_MACHINES: Final = "tests/services/test_shard_machines.py"
_PLAN: Final = "tests/services/test_shard_plan.py"
_MATH: Final = "tests/engine/test_engine_shard_math.py"
_KV: Final = "tests/engine/test_engine_shard_kv.py"
_WORKER: Final = "kv_services.node.shard_worker_state"
_COORDINATOR: Final = "kv_services.node.shard_coordinator_state"

SHARDS: Final = (
    Mutant(
        "pieces: slots go back while a call uses them",
        _WORKER,
        """
        if shard.busy is not None:
            self._closing[request_id, shard.epoch] = shard
        """,
        """
        if False:
            self._closing[request_id, shard.epoch] = shard
        """,
        (_MACHINES,),
    ),
    Mutant(
        "pieces: calls run in any order",
        _WORKER,
        "refusal = self._order_refusal(shard, event)",
        "refusal = None",
        (_MACHINES,),
    ),
    Mutant(
        "pieces: a former life of the coordinator is obeyed",
        _WORKER,
        "if shard is None or shard.caller != event.caller:",
        "if shard is None or shard.caller.node != event.caller.node:",
        (_MACHINES,),
    ),
    Mutant(
        "pieces: what a failed call was to store counts as stored",
        _WORKER,
        "if shard.running is not None and not failed:",
        "if shard.running is not None:",
        (_MACHINES,),
    ),
    Mutant(
        "pieces: one stays open when its request ends",
        _COORDINATOR,
        "effects += [ClosePiece(seq.request_id, seq.epoch, piece.node, cause) for piece in seq.pieces]",
        "effects += [ClosePiece(seq.request_id, seq.epoch, piece.node, cause) for piece in seq.pieces[1:]]",
        (_MACHINES,),
    ),
    Mutant(
        "pieces: a pass begins before all are open",
        _COORDINATOR,
        """
        if seq.opening:
            return []
        """,
        "",
        (_MACHINES,),
    ),
    Mutant(
        "pieces: a holder's death is not noticed",
        _COORDINATOR,
        "elif any(piece.node == node_id for piece in seq.pieces):",
        "elif False:",
        (_MACHINES,),
    ),
    Mutant(
        "pieces: a pass runs over the border of two",
        "kv_services.sharded.plan",
        "ends = [piece.token_end for stage in stages for piece in stage.pieces if piece.token_end > start]",
        "ends = [stop]",
        (_MACHINES,),
    ),
    Mutant(
        "pieces: a node gets more than it has room for",
        "kv_services.sharded.plan",
        "fits = all(piece_slots(piece, size.num_layers, size.block_size) <= nodes[piece.node] for piece in pieces)",
        "fits = True",
        (_PLAN,),
    ),
    Mutant(
        "pieces: two cells lie on each other",
        "kv_services.engine.shard_kv",
        "cells: NDArray[np.intp] = blocks * len(self.layers) + (layer - self.layers.start)",
        "cells: NDArray[np.intp] = blocks * len(self.layers) + 0 * layer",
        (_KV,),
    ),
    Mutant(
        "pieces: parts are joined without their maxima",
        "kv_services.engine.shard_math",
        "weight = np.exp(part.maxima - base)",
        "weight = np.exp(np.minimum(part.maxima, 0) * 0)",
        (_MATH,),
    ),
)
