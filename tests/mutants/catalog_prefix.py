"""The faults of who waits for what, whose blocks go first, and shards that belong together."""

from typing import Final

from tests.mutants.mutant import Mutant

_WAITING: Final = "tests/services/test_prefill_waiting.py"
_WATCH: Final = "tests/services/test_in_flight_watch.py"
_QUOTAS: Final = "tests/prefix/test_quotas.py"
_SHARE: Final = "tests/services/test_tenant_share.py"
_GROUPS: Final = "tests/prefix/test_groups.py"
_MARKS: Final = "tests/prefix/test_watermarks.py"
_FEED: Final = "tests/services/test_index_feed.py"
_PICTURES: Final = "tests/prefix/test_pictures.py"

PREFIX: Final = (
    Mutant(
        "waiting: the end of a computation ends no wait",
        "kv_services.node.prefill_state",
        "self._stop_waiting(lambda wait: wait.owner == owner, gave_up=False)",
        "pass",
        (_WAITING,),
    ),
    Mutant(
        "waiting: time ends no wait",
        "kv_services.node.prefill_state",
        "self._stop_waiting(lambda wait: self._now_ns >= wait.until_ns, gave_up=True)",
        "",
        (_WAITING,),
    ),
    Mutant(
        "waiting: a request waits again and again",
        "kv_services.node.prefill_state",
        "if job.wait is None and self._plan_wait is not None:",
        "if self._plan_wait is not None:",
        (_WAITING,),
    ),
    Mutant(
        "waiting: a silent node is still waited for",
        "kv_services.in_flight_watch",
        "if isinstance(effect, MemberDied | MemberSuspected | MemberUp):",
        "if isinstance(effect, MemberDied | MemberUp):",
        (_WATCH,),
    ),
    Mutant(
        "quota: a tenant is never over it",
        "kv_prefix.quotas",
        "return 0 if limit is None else max(0, self.used[account] + need - limit)",
        "return 0",
        (_QUOTAS,),
    ),
    Mutant(
        "quota: what a tenant retains goes like all else",
        "kv_prefix.quotas",
        "return (self._inner.priority(slot) + 1) * _PRIORITY_STEP + self._last_use[slot]",
        "return self._last_use[slot]",
        (_QUOTAS,),
    ),
    Mutant(
        "quota: a growing answer takes other tenants' slots",
        "kv_services.node.decode_state",
        "victims = [s for s in victims if self._memory.same_account(s, seq.namespace.digest)]",
        "pass",
        (_SHARE,),
    ),
    Mutant(
        "groups: what one rank lost stays in the others",
        "kv_prefix.groups",
        "pool.drop(name, reason)",
        "",
        (_GROUPS,),
    ),
    Mutant(
        "groups: ranks are not asked before the first one evicts",
        "kv_prefix.groups",
        "pool.require_open(part, num_new, use_partial=False)",
        "pass",
        (_GROUPS,),
    ),
    Mutant(
        "groups: receipts outlive the rank that gave them",
        "kv_prefix.groups",
        "if receipt.lives[rank] == self._lives[rank]:",
        "if True:",
        (_GROUPS,),
    ),
    Mutant(
        "watermarks: what is on its way down is evicted",
        "kv_prefix.watermarks",
        "if not self._filling or num_waiting:",
        "if not self._filling:",
        (_MARKS,),
    ),
    Mutant(
        "index: what a snapshot tells is taken for a run",
        "kv_services.replica.index_feed",
        "consecutive = isinstance(positions, range)",
        "consecutive = True",
        (_FEED,),
    ),
    Mutant(
        "pictures: a reader's are not compared",
        "kv_prefix.matching",
        """
        return token_digest(b"".join([slots.tokens[slot] for slot in chain]), tuple(extras))
        """,
        """
        return token_digest(b"".join([slots.tokens[slot] for slot in chain]), ())
        """,
        (_PICTURES,),
    ),
)
