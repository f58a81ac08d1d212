"""A tenant that has its share of a node's blocks: its own requests are refused or give way, nobody else's wait."""

from kv_core.ids import NodeId, RegionId, RequestId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import TenantQuotaError
from kv_prefix.quotas import AccountLimits, AccountSource
from kv_services.messages import OutputToken, Sampling
from kv_services.node.decode_events import (
    Computed,
    GiveUp,
    NotePreempted,
    RefuseReserve,
    ReserveAsked,
    SendTokens,
    StartStep,
    StepFinished,
    StepOutcome,
    TimePassed,
)
from kv_services.node.decode_state import DecodeMachine
from kv_services.node.prefill_events import PrefillAsked, ReplyFailed, StartPrefill
from kv_services.node.prefill_state import PrefillMachine
from tests.services.helpers_prefill import of as prefill_of

BLOCK = 4
SPACES = {name: Namespace("m", "w", salt=name, block_size=BLOCK) for name in ("a", "b")}
GREEDY = Sampling(max_tokens=12, temperature=0.0, top_p=1.0, seed=0, stop_token_ids=())


def make_pool(quota: int, num_slots: int = 16) -> BlockPool:
    def account_of(digest: bytes) -> str | None:
        return next((name for name, space in SPACES.items() if space.digest == digest), None)

    source = AccountSource({"a": AccountLimits(quota, None)}, account_of)
    return BlockPool(num_slots, BLOCK, region=RegionId(1), accounts=source)


def prefill(pool: BlockPool) -> PrefillMachine:
    return PrefillMachine(
        NodeId("p"), pool, block_size=BLOCK, num_slots=16, max_waiting=9, plan_pull=lambda hashes, have: None
    )


def ask(tenant: str, name: str, num_tokens: int) -> PrefillAsked:
    tokens = tuple(range(100 * len(name), 100 * len(name) + num_tokens))
    return PrefillAsked(0, RequestId(name), 1, NodeId("g"), SPACES[tenant], tokens, NodeId("d"), 0, 1_000)


def test_a_prompt_beyond_its_tenant_s_share_is_refused_and_the_next_one_has_its_turn() -> None:
    m = prefill(make_pool(quota=3))
    effects = m.step(ask("a", "big", 17))
    (refused,) = prefill_of(effects, ReplyFailed)
    assert isinstance(refused.error, TenantQuotaError)
    assert [e.request_id for e in prefill_of(m.step(ask("b", "other", 33)), StartPrefill)] == ["other"]
    m.check()


def reserve(m: DecodeMachine, tenant: str, name: str, num_tokens: int, max_tokens: int = 12) -> list[object]:
    tokens = tuple(range(100 * len(name), 100 * len(name) + num_tokens))
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, top_p=1.0, seed=0, stop_token_ids=())
    return list(
        m.step(
            ReserveAsked(
                now_ns=0,
                request_id=RequestId(name),
                epoch=1,
                gateway=NodeId("g"),
                namespace=SPACES[tenant],
                tokens=tokens,
                num_confirmed=0,
                sampling=sampling,
                deadline_ns=10_000,
                compute_locally=True,
            )
        )
    )


def decode(pool: BlockPool) -> DecodeMachine:
    return DecodeMachine(NodeId("d"), pool, block_size=BLOCK, num_slots=16, max_batch=8, max_waiting=8)


def test_a_reserve_beyond_its_tenant_s_share_is_refused_at_once_and_others_are_served() -> None:
    m = decode(make_pool(quota=3))
    reserve(m, "a", "1", 8)
    refused = [e for e in reserve(m, "a", "22", 8) if isinstance(e, RefuseReserve)]
    assert len(refused) == 1 and isinstance(refused[0].error, TenantQuotaError)
    assert not [e for e in reserve(m, "b", "333", 20) if isinstance(e, RefuseReserve)]
    assert m.num_running == 2
    m.check()


def run_steps(m: DecodeMachine, effects: list[object], stop_at: int = 60) -> list[object]:
    """Carry out computing and steps until nothing is left to do; all effects in order."""
    done: list[object] = []
    pending = list(effects)
    for _ in range(stop_at):
        done += pending
        work = [e for e in pending if isinstance(e, StartStep)]
        if not work:
            return done
        outcomes = tuple(StepOutcome(item.request_id, item.epoch, OutputToken(7)) for item in work[0].items)
        pending = list(m.step(StepFinished(outcomes)))
        for effect in [e for e in pending if type(e).__name__ == "StartCompute"]:
            pending += m.step(Computed(effect.request_id, effect.epoch))  # type: ignore[attr-defined]  # by its name
    return done


def test_a_request_that_grows_over_its_tenant_s_share_takes_its_own_tenant_s_slots_and_no_other_s() -> None:
    m = decode(make_pool(quota=5, num_slots=16))
    effects: list[object] = []
    for tenant, name in (("a", "1"), ("a", "22"), ("b", "333")):
        effects += reserve(m, tenant, name, 7, max_tokens=5)
        effects += m.step(Computed(RequestId(name), 1))
    done = run_steps(m, effects)
    preempted = {e.request_id for e in done if isinstance(e, NotePreempted)}
    assert preempted == {"22"}, "the younger of the two of its own tenant, not the youngest of all"
    finished = {e.request_id for e in done if isinstance(e, SendTokens) and e.finish}
    assert finished == {"1", "22", "333"} and not [e for e in done if isinstance(e, GiveUp)]
    m.check()


def test_one_that_outgrows_the_share_alone_is_given_up_with_the_reason() -> None:
    m = decode(make_pool(quota=2))
    effects = reserve(m, "a", "1", 7, max_tokens=12)
    effects += m.step(Computed(RequestId("1"), 1))
    done = [*run_steps(m, effects), *m.step(TimePassed(1))]
    (given_up,) = [e for e in done if isinstance(e, GiveUp)]
    assert isinstance(given_up.error, TenantQuotaError)
    assert m.num_running == m.num_waiting == 0
    m.check()
