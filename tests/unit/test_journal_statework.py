"""Changes of the shared state against the plainest model of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.journal.statework import Held, StateWork, keys_of
from ringfence.kernel.journal.types import StateConflict
from ringfence.syscalls.base import StateChange

keys = st.sampled_from("abc")
changes = st.builds(
    StateChange,
    reads=st.dictionaries(keys, st.integers(0, 3)),
    puts=st.dictionaries(keys, st.binary(max_size=2)),
    deletes=st.lists(keys, max_size=2),
)


@given(st.lists(st.tuples(changes, st.booleans()), max_size=8))
def test_changes_in_one_transaction_are_as_changes_one_after_the_other(plan):
    """`undone` changes are applied and taken back, as when the body can't be made."""
    work = StateWork()
    work.load([Held("a", 2, True, "before", 1), Held("b", 1, False, "before", 2)])
    model = {"a": (2, b"old"), "b": (1, None)}
    history = []
    for step, (change, undone) in enumerate(plan):
        stale = {k for k, seen in change.reads.items() if model.get(k, (0, None))[0] != seen}
        mark = work.mark()
        try:
            done = work.apply(change, "me", step)
        except StateConflict as conflict:
            moved = {key for key, now in conflict.keys.items() if now.read == change.reads[key]}
        else:
            moved = set()
        assert moved == stale
        if moved:
            continue
        if undone:
            work.undo(mark)
            continue
        previous = {}
        for key, value in [*change.puts.items(), *((key, None) for key in change.deletes)]:
            version, old = model.get(key, (0, None))
            previous.setdefault(key, version if old is not None else 0)
            if value is not None or old is not None:
                model[key] = (version + 1, value)
                history.append((key, version + 1, value, "me", step))
        assert dict(done.previous) == previous
        assert dict(done.versions) == {key: model.get(key, (0, None))[0] for key in previous}
        assert keys_of(change) == {*change.reads, *previous}
    assert list(map(tuple, work.changed)) == history
    for key in "abc":
        version, value = model.get(key, (0, None))
        assert work.current(key)[:3] == (key, version, value is not None)
    newest = {one.key: (one.version, one.value) for one in work.newest()}
    assert newest == {key: model[key] for key in {entry[0] for entry in history}}
    assert work.history()["versions"] == [entry[1] for entry in history]
