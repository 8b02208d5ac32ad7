"""The order in which things go, against one that looks at all of them each time."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.radix.greedy_dual import MOST_USES, GreedyDual

KEYS = range(6)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "use", "remove"]), st.sampled_from(KEYS)),
        st.tuples(st.just("raise"), st.sampled_from(KEYS), st.integers(1, 5)),
        st.tuples(st.just("pop"), st.sets(st.sampled_from(KEYS), max_size=2)),
    ),
    max_size=60,
)


class Naive:
    """The definition, word by word."""

    def __init__(self):
        self.clock, self.ticks, self.used = 0, 0, {}

    def use(self, key):
        self.ticks += 1
        count = self.used[key][2] + 1 if key in self.used else 1
        self.used[key] = (self.clock, self.ticks, min(count, MOST_USES))

    def pop(self, worth, spared):
        last = [(key, *use) for key, use in self.used.items() if key not in spared]
        dues = [(clock + count * worth(key), tick, key) for key, clock, tick, count in last]
        if not dues:
            return None
        due, _, key = min(dues)
        self.clock = max(self.clock, due)
        del self.used[key]
        return key


@given(st.lists(st.integers(0, 9), min_size=len(KEYS), max_size=len(KEYS)), steps)
def test_the_heap_gives_up_what_a_look_at_all_of_them_would(worths, steps):
    order, naive = GreedyDual(), Naive()
    for what, *arguments in steps:
        if what == "pop":
            (spared,) = arguments
            assert order.pop(worths.__getitem__, spared) == naive.pop(worths.__getitem__, spared)
        elif what == "raise":
            key, by = arguments
            worths[key] += by
        else:
            (key,) = arguments
            held = key in naive.used
            if what == "add" and not held:
                order.add(key)
                naive.use(key)
            elif what == "use":
                order.use(key)
                naive.use(key) if held else None
            elif what == "remove":
                order.remove(key)
                naive.used.pop(key, None)
        order.check_invariants()
        assert set(order) == naive.used.keys()


def test_of_equals_the_one_unused_longest_goes():
    order = GreedyDual()
    for key in KEYS:
        order.add(key)
    order.use(0)
    assert [order.pop(lambda key: 7) for _ in range(7)] == [1, 2, 3, 4, 5, 0, None]


def test_what_is_worth_more_outlives_others_but_not_for_ever():
    order = GreedyDual()
    order.add(0)
    gone = []
    for key in range(1, 9):
        order.add(key)
        gone.append(order.pop(lambda key: 3 if key == 0 else 1))
    assert gone[:2] == [1, 2] and 0 in gone


def test_what_was_used_often_goes_in_the_end():
    order, gone = GreedyDual(), []
    order.add(0)
    for _ in range(1000):
        order.use(0)
    for key in range(1, 3 * MOST_USES):
        order.add(key)
        gone.append(order.pop(lambda key: 1))
    assert gone.index(0) == MOST_USES - 1


def test_a_key_that_comes_back_does_not_take_its_old_place():
    order = GreedyDual()
    worth = {0: 9, 1: 5}
    order.add(0)
    order.add(1)
    assert order.pop(worth.__getitem__) == 1  # 0 was looked at, its entry says 9
    order.remove(0)
    worth[0] = 1
    order.add(0)  # due at 6 now
    order.add(1)
    assert order.pop(worth.__getitem__) == 0


def test_entries_of_what_is_gone_do_not_pile_up():
    order = GreedyDual()
    for key in range(10_000):
        order.add(key)
        order.remove(key)
    order.check_invariants()
