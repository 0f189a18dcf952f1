"""ReTopK point by point: what the paper leaves open, how it is read, and the ablation switches."""

import math

import pytest
import torch

from sparsesel.kv import KVView
from sparsesel.registry import make_selector
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import Stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel_retopk import stages
from sparsesel_retopk.config import ReTopKConfig
from sparsesel_retopk.state import SPARE, ReTopKState

SMALL = {"topk": 6, "cache_size": 4, "window_size": 4, "recall_size": 2, "refresh_interval": 0}


def make(**overrides) -> ReTopKConfig:
    return ReTopKConfig(**(SMALL | overrides))


def replay_of(stream: Stream, **overrides) -> Replay:
    return Replay(make_selector(make(**overrides)), stream)


def steady(length: int, queries: list[list[float]], key_seed: int = 0, dim: int = 4) -> Stream:
    """One head over random keys; the last positions have these queries, earlier ones the first axis reversed."""
    query = torch.zeros(1, 1, length, dim)
    query[..., 0] = -1.0
    query[0, 0, length - len(queries) :] = torch.tensor(queries)
    key = random_stream(key_seed, length=length, num_attention_heads=1, num_key_value_heads=1, head_dim=dim).key
    return Stream(query, key, torch.randn(key.shape, generator=torch.Generator().manual_seed(1)))


def counted(replay: Replay, name: str) -> float:
    return float(replay.state.counters.read()[name].sum())


def exact_support(stream: Stream, position: int, topk: int, row: int = 0, head: int = 0) -> list[int]:
    """Top-K over the keys up to a position by brute force in float64."""
    group = stream.query.shape[1] // stream.key.shape[1]
    scores = stream.key[row, head // group, : position + 1].double() @ stream.query[row, head, position].double()
    return sorted(sorted(range(position + 1), key=lambda at: (-scores[at].item(), at))[:topk])


def stored(replay: Replay, position: int, row: int = 0, head: int = 0) -> list[int]:
    """The support in the entry of a position, which must be there."""
    state = replay.state
    slot = position % state.stamps.shape[1]
    assert state.stamps[row, slot] == position
    return [at for at in state.supports[row, head, slot].tolist() if at >= 0]


def plant(replay: Replay, supports: dict[int, list[int]], **overrides) -> None:
    """Build the supports of the prompt's entries and replace some of them, by position."""
    config, state = make(**overrides), replay.state
    state.widen(config.topk)
    stages.build_supports(state, replay.kv(), config, config.topk, scale=replay.scale)
    for position, support in supports.items():
        slot = position % state.stamps.shape[1]
        assert state.stamps[0, slot] == position
        state.supports[0, 0, slot] = -1
        state.supports[0, 0, slot, : len(support)] = torch.tensor(support, dtype=torch.int32)


E1, E2 = [1.0, 0, 0, 0], [0, 1.0, 0, 0]


class TestCurrentToken:
    def test_window_counts_it(self):
        """With W = 1 the window is the current token alone."""
        stream = steady(30, [E1, E1])
        stream.key[0, 0, -1] = torch.tensor([4.0, 0, 0, 0])  # the best key for the current query
        replay = replay_of(stream, window_size=1).prefill(29)
        step = replay.step()
        assert counted(replay, "reuse") == 1
        assert step.mask[0, 0, 29]

    def test_nothing_forces_it_in_without_a_window(self):
        stream = steady(30, [E1, E1])
        stream.key[0, 0, -1] = torch.tensor([4.0, 0, 0, 0])
        replay = replay_of(stream, window_size=0).prefill(29)
        step = replay.step()
        assert counted(replay, "reuse") == 1
        assert not step.mask[0, 0, 29]
        assert counted(replay, "candidates") < 30

    def test_it_is_ranked_not_forced(self):
        """The window makes candidates, not members of the support."""
        stream = steady(30, [E1, E1])
        stream.key[0, 0, -4:] = torch.tensor([-4.0, 0, 0, 0])
        replay = replay_of(stream).prefill(29)
        step = replay.step()
        assert counted(replay, "reuse") == 1
        assert not step.mask[0, 0, -4:].any()


class TestPromptEntries:
    @pytest.mark.parametrize("chunks", [[40], [38, 2], [1, 30, 1, 1, 7]])
    @pytest.mark.parametrize("topk", [6, "20%"])
    def test_last_positions_have_their_causal_exact_supports(self, chunks, topk):
        stream = random_stream(1, lengths=[41, 20])
        replay = replay_of(stream, topk=topk).prefill(*chunks)
        replay.step()
        for row, length in enumerate((40, 19)):
            alone = stream.alone(row)
            for position in range(length - 4, length):
                budget = topk if isinstance(topk, int) else math.ceil(0.2 * (position + 1))
                for head in range(4):
                    expected = exact_support(alone, position, budget, head=head)
                    assert stored(replay, position, row, head) == expected

    def test_short_prompt_has_supports_of_all_keys(self):
        replay = replay_of(random_stream(2, length=5)).prefill(4)
        replay.step()
        assert [stored(replay, position) for position in range(4)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]

    def test_pieces_of_the_product_make_no_difference(self, monkeypatch):
        stream = random_stream(3, lengths=[45, 30])
        runs = []
        for limit in (1 << 24, 2 * 4 * 41 * 3, 1):  # all at once, three queries at a time, one
            monkeypatch.setattr(stages, "_BUILD_SCORES", limit)
            replay = replay_of(stream, cache_size=8).prefill(40)
            replay.step()
            runs.append(replay.state.supports)
        assert torch.equal(runs[0], runs[1])
        assert torch.equal(runs[0], runs[2])

    def test_next_turn_leaves_supports_of_decode_steps_alone(self):
        """A short second prefill enters beside what decode steps left, and builds only its own supports."""
        stream = random_stream(4, length=60)
        replay = replay_of(stream, cache_size=6).prefill(40)
        step = replay.steps(3)[-1]
        before = stored(replay, 42, head=1)
        assert before == step.support.indices[0, 1, 0].tolist()
        replay.state.supports[0, 1, 42 % replay.state.stamps.shape[1], :6] = torch.arange(6, dtype=torch.int32)
        replay.prefill(2)
        replay.step()
        assert stored(replay, 42, head=1) == [0, 1, 2, 3, 4, 5]
        assert stored(replay, 44, head=1) == exact_support(stream, 44, 6, head=1)

    def test_only_what_is_due_is_built(self):
        """One row's entries may be due where another's are not."""
        stream = random_stream(26, batch=2, length=50)
        replay = replay_of(stream).prefill(49)
        state = replay.state
        state.widen(6)
        state.unbuilt[1] = False
        state.supports[1, :, :, :6] = torch.arange(6, dtype=torch.int32)
        replay.step()
        assert stored(replay, 48, row=0) == exact_support(stream, 48, 6, row=0)
        assert stored(replay, 48, row=1) == [0, 1, 2, 3, 4, 5]


class TestRefresh:
    def test_falls_on_multiples_of_its_interval_from_the_end_of_prefill(self):
        replay = replay_of(random_stream(5, length=60), refresh_interval=5, similarity_threshold=-1.0).prefill(40)
        seen = []
        for _ in range(17):
            before = counted(replay, "refresh") if seen else 0
            replay.step()
            seen.append(counted(replay, "refresh") - before)
        heads = 4
        assert [t for t, count in enumerate(seen) if count] == [5, 10, 15]  # t_dec is 0 in the first step
        assert set(seen) == {0, heads}
        assert counted(replay, "exact") == 3 * heads

    def test_each_sequence_has_its_own_count(self):
        """Steps are counted from the end of the row's own prefill, also where rows differ in length."""
        replay = replay_of(random_stream(6, lengths=[60, 33]), refresh_interval=4, similarity_threshold=-1.0)
        replay.prefill(40).steps(5)
        assert replay.state.prefill_end.tolist() == [40, 13]
        assert counted(replay, "refresh") == 2 * 4

    def test_next_turn_starts_the_count_again(self):
        replay = replay_of(random_stream(7, length=70), refresh_interval=5, similarity_threshold=-1.0).prefill(40)
        replay.steps(4)
        replay.prefill(10).steps(5)
        assert counted(replay, "refresh") == 0
        replay.step()
        assert counted(replay, "refresh") == 4

    def test_adds_one_exact_entry_and_no_more(self):
        stream = random_stream(8, length=60)
        replay = replay_of(stream, refresh_interval=3, similarity_threshold=-1.0).prefill(40)
        replay.steps(3)
        others = [stored(replay, position) for position in (40, 41, 42)]
        replay.step()
        assert counted(replay, "refresh") == 4
        assert stored(replay, 43) == exact_support(stream, 43, 6)
        assert [stored(replay, position) for position in (40, 41, 42)] == others


class TestRecall:
    def test_retrieves_before_it_inserts(self):
        """A cold first step cannot recall itself; the second recalls the first."""
        replay = replay_of(steady(20, [E1, E1]), topk=3, cache_size=1, recall_size=1).skip(18)
        replay.step()
        assert counted(replay, "cold") == counted(replay, "exact") == 1
        replay.step()
        assert counted(replay, "reuse") == 1

    def test_entries_beyond_cache_size_are_out_of_reach(self):
        """The ring has spare slots; only the last C positions may be recalled."""
        for cache_size, reused in ((3, True), (2, False)):
            replay = replay_of(steady(30, [E1, E2, E2, E1]), cache_size=cache_size).prefill(29)
            replay.step()
            assert counted(replay, "reuse") == reused
            assert counted(replay, "fallback") == (not reused)

    def test_positions_that_were_not_seen_are_not_mistaken_for_older_ones(self):
        """Their slots hold entries of a round before."""
        replay = replay_of(random_stream(27, length=100)).prefill(60)
        replay.steps(20)
        replay.skip(2)
        _, found = replay.state.recent(torch.tensor([82]), 4)
        assert found.tolist() == [[False, False, True, True]]

    def test_ties_go_to_the_newest(self):
        """Of four equal queries the two newest are recalled."""
        replay = replay_of(steady(31, [E1] * 5), window_size=0, topk=6).prefill(30)
        plant(replay, {at: list(range(6 * (at - 26), 6 * (at - 25))) for at in range(26, 30)}, cache_size=4)
        step = replay.step()
        assert counted(replay, "candidates") == 12
        assert step.mask[0, 0].nonzero().min() >= 12  # the supports planted in 28 and 29

    def test_fewer_are_recalled_where_fewer_are_cached(self):
        replay = replay_of(steady(30, [E1, E1, E1]), recall_size=4, topk=3).skip(28)
        replay.step()
        replay.step()
        assert counted(replay, "cold") == 1
        assert counted(replay, "reuse") == 1

    @pytest.mark.parametrize("bad", [[0.0] * 4, [math.nan, 1, 0, 0], [math.inf, 1, 0, 0]])
    def test_query_without_a_norm_is_similar_to_nothing(self, bad):
        """Its similarity is 0 to every other, also to its like; a threshold of 0 is met."""
        for queries in ([bad, E1], [E1, bad], [bad, bad]):
            for threshold, path in ((0.01, "fallback"), (0.0, "reuse")):
                overrides = {"similarity_threshold": threshold, "cache_size": 1, "recall_size": 1}
                replay = replay_of(steady(30, queries), **overrides).prefill(29)
                step = replay.step()
                assert counted(replay, path) == 1
                assert bool(step.output.isfinite().all()) == math.isfinite(sum(queries[1]))

    def test_duplicates_are_removed(self):
        """What several supports and the window share is scored and counted once."""
        replay = replay_of(steady(30, [E1] * 5), recall_size=4).prefill(29)
        step = replay.step()
        union = set(range(26, 30))
        for position in (25, 26, 27, 28):
            union |= set(exact_support(replay.stream, position, 6))
        assert counted(replay, "candidates") == len(union) < 4 * 6 + 4
        assert step.mask[0, 0].sum() == 6

    def test_candidates_are_never_truncated(self):
        """Disjoint supports and the window all count: R·K + W."""
        replay = replay_of(steady(60, [E1] * 5), recall_size=4, window_size=4).prefill(59)
        plant(replay, {at: list(range(6 * (at - 55), 6 * (at - 54))) for at in range(55, 59)})
        replay.step()
        assert counted(replay, "candidates") == 4 * 6 + 4


class TestExactPath:
    def test_threshold_above_one_is_always_exact(self):
        stream = random_stream(10, length=80, correlation=1.0, jump=0.0)  # cosines of exactly 1, or a rounding above
        replay = replay_of(stream, similarity_threshold=1.0000001).prefill(50)
        exact = Replay(make_selector("exact_topk,topk=6"), stream).prefill(50)
        for one, other in zip(replay.steps(30), exact.steps(30), strict=True):
            assert torch.equal(one.mask, other.mask)
        assert counted(replay, "fallback") == counted(replay, "exact") == counted(replay, "steps") == 120

    def test_underfull_candidates_are_promoted(self):
        """Two recalled supports that are short, and no window, cannot fill the budget."""
        stream = steady(30, [E1, E1, E1, E1])
        replay = replay_of(stream, topk=12, window_size=0).prefill(29)
        plant(replay, {at: [0, 1, 2, 3, at] for at in range(25, 29)}, topk=12)
        step = replay.step()
        assert counted(replay, "underfull") == counted(replay, "exact") == 1
        assert step.mask[0, 0].nonzero().flatten().tolist() == exact_support(stream, 29, 12)

    def test_as_many_candidates_as_keys_is_not_underfull(self):
        """Up to L = K every key is attended on the reuse path, if the window holds the current one."""
        for window_size, path in ((1, "reuse"), (0, "underfull")):
            replay = replay_of(steady(20, [E1] * 20), topk=20, window_size=window_size).prefill(10)
            for step in replay.steps(10):
                assert step.mask.all()
            assert counted(replay, path) == 10

    def test_reasons_count_once_in_their_order(self):
        """A refresh of an empty cache with nothing similar is a refresh; then cold comes before fallback."""
        stream = random_stream(11, length=60)
        replay = replay_of(stream, refresh_interval=4, similarity_threshold=1.5).skip(43)
        replay.step()  # t_dec = 43: cold
        assert counted(replay, "cold") == 4
        replay.step()  # t_dec = 44: refresh
        assert counted(replay, "refresh") == 4
        replay.step()
        assert counted(replay, "fallback") == 4
        assert counted(replay, "exact") == 12
        assert counted(replay, "underfull") == counted(replay, "reuse") == 0

    def test_only_key_value_heads_of_exact_heads_are_scanned(self, monkeypatch):
        """Exact heads alone are ranked over all keys."""
        scanned = []
        scan = stages.scan_heads

        def recording(query, kv, heads, budget, *, scale):
            scanned.append(int(heads.sum()))
            return scan(query, kv, heads, budget, scale=scale)

        monkeypatch.setattr(stages, "scan_heads", recording)
        replay = replay_of(random_stream(12, length=90, jump=0.2)).prefill(40)
        replay.steps(50)
        assert sum(scanned) == counted(replay, "exact") > 0
        assert min(scanned) < 4

    def test_both_paths_over_all_heads_give_the_same(self):
        """What runs where nothing may wait for the device equals what runs on the host."""
        for overrides in ({}, {"topk": "15%"}, {"fallback_scope": "group-mean"}):
            stream = random_stream(13, lengths=[90, 60], jump=0.2)
            replay = replay_of(stream, **overrides).prefill(50)
            paths = torch.zeros(2)
            for _ in range(20):
                seen: list[stages.Ranked] = []
                host, device = stages.rank_on_host, stages.rank_on_device
                args = []

                def rank(*given, scale, args=args, host=host, seen=seen):
                    args.extend([given, scale])
                    seen.append(host(*given, scale=scale))
                    return seen[-1]

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("sparsesel_retopk.selector.rank_on_host", rank)
                    replay.step()
                given, scale = args
                both = device(*given, scale=scale)
                assert torch.equal(both.indices, seen[0].indices)
                torch.testing.assert_close(both.scores, seen[0].scores)
                exact = given[2]
                paths += torch.tensor([exact.sum(), (~exact).sum()])
            assert (paths > 0).all()

    def test_nothing_waits_for_the_device(self):
        """Tensors on the meta device have no content, so any question about it raises."""
        for overrides in ({"topk": 6}, {"topk": "10%"}, {"fallback_scope": "group-any"}, {"retrieval": "recent"}):
            layer = LayerSpec(0, 4, 2, 16, torch.float32, torch.device("meta"), batch_size=2)
            selector = make_selector(make(**overrides))
            state = selector.init_state(layer)
            starts = torch.zeros(2, dtype=torch.int64, device="meta")

            def kv(length, starts=starts):
                return KVView.dense(*torch.empty(2, 2, 2, length, 16, device="meta"), starts=starts)

            selector.observe_prefill(torch.empty(2, 4, 20, 16, device="meta"), kv(20), state, scale=0.25)
            for length in (21, 22):
                query = torch.empty(2, 4, 1, 16, device="meta")
                assert selector.attend(query, kv(length), state, scale=0.25).shape == (2, 4, 1, 16)
                support = selector.discover(query, kv(length), state, scale=0.25)
                assert support.indices is not None
                assert support.indices.shape[:3] == (2, 4, 1)


class TestFallbackScope:
    # Two groups of two heads; per head the similarity of the only cached query.
    SIMILAR = torch.tensor([[0.95, 0.7, 0.95, 0.86]])

    @pytest.mark.parametrize(
        ("scope", "expected"),
        [
            ("head", [False, True, False, False]),
            ("group-any", [True, True, False, False]),
            ("group-mean", [True, True, False, False]),
        ],
    )
    def test_decides(self, scope, expected):
        low = stages.falls_back(self.SIMILAR, 2, make(fallback_scope=scope))
        assert low.tolist() == [expected]

    def test_mean_may_save_a_low_head(self):
        similar = torch.tensor([[0.99, 0.8]])
        decisions = {
            scope: stages.falls_back(similar, 1, make(fallback_scope=scope)).tolist()[0]
            for scope in ("head", "group-any", "group-mean")
        }
        assert decisions == {"head": [False, True], "group-any": [True, True], "group-mean": [False, False]}

    def test_not_a_number_falls_back(self):
        similar = torch.tensor([[math.nan, 0.99]])
        assert stages.falls_back(similar, 2, make()).tolist() == [[True, False]]
        for scope in ("group-any", "group-mean"):
            assert stages.falls_back(similar, 1, make(fallback_scope=scope)).all()


class TestAblations:
    def test_recent_retrieval_ignores_similarity(self):
        """A similar query out of the last R is not recalled; ρmax is over those R only."""
        stream = steady(30, [E1, E2, E2, E1])
        assert counted_after(stream, "reuse", retrieval="similarity") == 1
        assert counted_after(stream, "fallback", retrieval="recent") == 1
        assert counted_after(stream, "reuse", retrieval="recent", recall_size=3) == 1

    def test_without_fallback_nothing_is_too_dissimilar(self):
        stream = steady(30, [E2, E2, E2, E2, E1])
        assert counted_after(stream, "fallback") == 1
        assert counted_after(stream, "reuse", fallback=False) == 1

    def test_without_window_only_recalled_keys_are_candidates(self):
        stream = steady(30, [E1, E1])
        with_window, without = (counted_after(stream, "candidates", window_size=size) for size in (4, 0))
        assert without == len(set(exact_support(stream, 28, 6)) | set(exact_support(stream, 27, 6)))
        assert with_window > without

    def test_without_refresh_similar_queries_reuse_for_ever(self):
        stream = random_stream(14, length=120, correlation=0.999, jump=0.0)
        for interval, refreshes in ((32, 2 * 4), (0, 0)):
            replay = replay_of(stream, refresh_interval=interval).prefill(50)
            replay.steps(70)
            assert counted(replay, "refresh") == counted(replay, "exact") == refreshes


def counted_after(stream: Stream, name: str, **overrides) -> float:
    """A counter after prefill of all but one token and one step."""
    replay = replay_of(stream, **overrides).prefill(stream.length - 1)
    replay.step()
    return counted(replay, name)


class TestCrop:
    @pytest.mark.parametrize("rejected", [1, 5, SPARE])
    def test_rejected_drafts_leave_no_trace(self, rejected):
        stream = random_stream(15, lengths=[130, 90])
        fresh = replay_of(stream, refresh_interval=7).prefill(70)
        fresh.steps(9)
        draft = fresh.fork()
        draft.stream = stream.diverging(79, seed=16)
        draft.steps(rejected)
        draft.crop(rejected)
        draft.stream = stream
        for one, other in zip(draft.steps(15), fresh.steps(15), strict=True):
            assert torch.equal(one.mask, other.mask)
            assert torch.equal(one.output, other.output)

    def test_stale_entry_of_the_same_position_is_void(self):
        """After a crop, the cropped position's old query must not be recalled before it is written anew."""
        replay = replay_of(steady(30, [E1, E1])).prefill(28)
        replay.step()
        replay.crop(1)
        replay.skip(1)  # the position comes back, unseen by the selector
        _, found = replay.state.recent(torch.tensor([29]), 4)
        assert found.tolist() == [[False, True, True, True]]

    def test_crop_beyond_the_spare_slots_keeps_what_is_left(self):
        """Entries that the ring had dropped are gone; the rest are valid, and the step is sound."""
        stream = random_stream(17, length=140)
        replay = replay_of(stream).prefill(60)
        replay.steps(SPARE + 3)
        replay.crop(SPARE + 3)
        _, found = replay.state.recent(torch.tensor([60]), 4)
        assert found.tolist() == [[True, False, False, False]]
        step = replay.step()
        assert bool((step.mask.sum(-1) == 6).all())

    def test_into_the_prompt_equals_a_shorter_prompt(self):
        """Prompt entries older than the last C are kept with their queries, and built when they come into reach."""
        stream = random_stream(18, length=100)
        replay = replay_of(stream).prefill(60)
        replay.steps(2)
        replay.crop(2 + 10)
        shorter = replay_of(stream).prefill(50)
        for one, other in zip(replay.steps(12), shorter.steps(12), strict=True):
            assert torch.equal(one.mask, other.mask)
        assert replay.state.prefill_end.tolist() == [50]

    def test_prefill_end_moves_back_only(self):
        replay = replay_of(random_stream(19, lengths=[60, 40])).prefill(40)
        replay.steps(10)
        replay.crop(5)
        assert replay.state.prefill_end.tolist() == [40, 20]
        replay.crop(8)
        assert replay.state.prefill_end.tolist() == [37, 17]


class TestState:
    def test_padding_enters_nothing(self):
        """A chunk that lies before a short sequence's start leaves it cold."""
        replay = replay_of(random_stream(20, lengths=[40, 10])).prefill(25)
        assert (replay.state.stamps[1] < 0).all()
        assert replay.state.prefill_end.tolist() == [25, 0]

    def test_steps_before_a_sequence_begins_enter_nothing(self):
        """The other sequences' steps leave a later one cold, though its rows hold padding's queries."""
        stream = random_stream(20, lengths=[40, 10])
        for part in (stream.query, stream.key, stream.value):
            part[1, :, :30] = part[0, :, :30]  # padding is no NaN in a model
        replay = replay_of(stream, similarity_threshold=-1.0)
        for _ in range(30):
            replay.attend()
        _, found = replay.state.recent(torch.tensor([30, 0]), 8)
        assert found.all(1).tolist() == [True, False]
        assert not found[1].any()
        before = counted(replay, "cold")
        replay.step()
        assert counted(replay, "cold") == before + 4

    def test_supports_widen_with_a_relative_budget(self):
        stream = random_stream(21, length=100)
        replay = replay_of(stream, topk="80%", similarity_threshold=-1.0).prefill(60)
        replay.step()
        before = replay.state.supports.shape[3]
        for step in replay.steps(39):
            assert bool((step.mask.sum(-1) == math.ceil(0.8 * step.mask.shape[2])).all())
        assert replay.state.supports.shape[3] > before
        assert counted(replay, "reuse") > 0

    def test_cost_states_what_is_kept(self):
        stream = random_stream(22, batch=2, length=90)
        for topk in (64, "10%"):
            replay = replay_of(stream, topk=topk).prefill(80)
            replay.steps(10)
            cost = replay.selector.cost(stream.layer_spec(), 90)
            assert cost.state_bytes == replay.state.nbytes()

    def test_starts_under_inference_mode_and_goes_on_outside(self):
        stream = random_stream(23, length=60)
        with torch.inference_mode():
            replay = replay_of(stream).prefill(40)
            replay.step()
        with torch.no_grad():
            replay.steps(5)
        assert counted(replay, "steps") == 24

    def test_gradients_are_not_kept(self):
        stream = random_stream(24, length=50)
        stream.query.requires_grad_()
        replay = replay_of(stream).prefill(40)
        output = replay.attend()
        assert output.requires_grad
        assert not any(tensor.requires_grad for tensor in replay.state.tensors().values())

    def test_is_in_the_type_of_the_layer(self):
        stream = random_stream(25, length=50).to(torch.bfloat16)
        replay = replay_of(stream).prefill(40)
        replay.steps(5)
        assert isinstance(replay.state, ReTopKState)
        assert replay.state.queries.dtype == torch.bfloat16
        assert replay.state.inverse_norms.dtype == torch.float32


def test_cost_is_the_stated_fraction_of_dense_attention():
    """G·(C + M + K) / 2L of full attention's bytes for queries, keys and values: 0.070 at 128K with M = 2080."""
    layer = LayerSpec(0, 28, 4, 128, torch.bfloat16, torch.device("cpu"))
    length, group, row = 128 * 1024, 7, 128 * 2
    cost = make_selector("retopk").cost(layer, length)
    full = make_selector("full").cost(layer, length)
    read = cost.key_bytes + cost.value_bytes + 28 * 32 * row
    assert read / full.bytes_read == pytest.approx(group * (32 + 2080 + 512) / (2 * length))
    assert read / full.bytes_read == pytest.approx(0.070, abs=5e-4)
    # Norms, stamps, recalled supports and scores come on top.
    assert 0.070 < cost.bytes_read / full.bytes_read < 0.075
    assert cost.attended == 512
