"""Entries on disk: whole or not there, checked before use, bounded, shared by processes."""

import json
import os
import threading

import pytest

from autoshard.cache.store import Key, Store, default_folder

KEY = Key("Net", {"model": "a", "plan": "b"})
PAYLOAD = bytes(range(256)) * 8


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "programs")
    assert made.keep(KEY, {"lines": ["x"]}, PAYLOAD) == ""
    return made


def only_file(store):
    (path,) = store.paths()
    return path


def test_an_entry_comes_back_and_no_file_is_left_beside_it(store):
    found = store.find(KEY)
    assert (found.entry.payload, found.entry.facts, found.note) == (PAYLOAD, {"lines": ["x"]}, "")
    assert [path.suffix for path in store.folder.iterdir()] == [".program"]


def test_a_miss_says_what_changed_since_the_nearest_entry(store):
    store.keep(Key("Net", {"model": "c", "plan": "d"}), {}, b"")
    other = store.find(Key("Net", {"model": "a", "plan": "c"}))
    assert (other.entry, other.note) == (None, "changed since the nearest entry: plan")
    assert store.find(Key("Other", {"model": "a", "plan": "c"})).note == ""


def _cut(raw):
    return raw[:-1]


def _longer(raw):
    return raw + b"x"


def _flipped(raw):
    return raw[:-7] + bytes([raw[-7] ^ 1]) + raw[-6:]


def _facts(raw):
    return raw.replace(b'"x"', b'"y"')


def _foreign(raw):
    return b"\x80\x04a pickle of somebody's\n" + raw


def _format(raw):
    return raw.replace(b"autoshard program 1", b"autoshard program 0")


def _other_key(raw):
    head, _, payload = raw.partition(b"\n")
    return json.dumps({**json.loads(head), "parts": {"model": "z"}}).encode() + b"\n" + payload


DAMAGE = {
    "of 2047 bytes, not 2048 as written": (_cut,),
    "of 2049 bytes, not 2048 as written": (_longer,),
    "damaged (its checksum differs)": (_flipped, _facts),
    "no saved program": (
        *(_foreign, _format, lambda raw: b"", lambda raw: b"{}\n" + raw, lambda raw: b"[" * 10**5),
        lambda raw: raw.replace(b'"parts"', b'"other"'),
    ),
    "another program's": (_other_key,),
}


@pytest.mark.parametrize(
    "words, harm", [(words, harm) for words, several in DAMAGE.items() for harm in several]
)
def test_a_damaged_entry_is_told_about_removed_and_never_used(store, words, harm):
    path = only_file(store)
    path.write_bytes(harm(path.read_bytes()))
    found = store.find(KEY)
    assert found.entry is None
    assert found.note == f"the entry was {words} and is made again"
    assert not path.exists()


def test_an_entry_under_another_s_name_is_not_used(store):
    other = Key("Net", {"model": "a", "plan": "c"})
    path = only_file(store)
    path.rename(path.with_name(f"Net-{other.text}.program"))
    assert "another program's" in store.find(other).note


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_to_is_not_used(store, what):
    place = store.folder if what == "folder" else only_file(store)
    place.chmod(0o777)
    found = store.find(KEY)
    assert found.entry is None
    assert f"others may write to `{place}`" in found.note


def test_what_is_no_entry_beside_it_disturbs_neither_a_miss_nor_clearing(store):
    (store.folder / "Net-x.program").mkdir()
    for number, parts in enumerate(("[1]", "null", "7")):
        head = (
            f'{{"format": "autoshard program 1", "facts": {{}}, "label": "Net", "parts": {parts}}}'
        )
        (store.folder / f"Net-{number}.program").write_text(head)
    found = store.find(Key("Net", {"model": "a", "plan": "c"}))
    assert (found.entry, found.note) == (None, "changed since the nearest entry: plan")
    assert store.clear()[0] == 4


def test_a_bad_entry_that_may_not_be_removed_stops_nothing(store, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    path = only_file(store)
    monkeypatch.setattr(os, "utime", refuse)
    assert store.find(KEY).entry is not None
    path.write_bytes(b"harmed")
    monkeypatch.setattr(type(path), "unlink", refuse)
    assert "is made again" in store.find(KEY).note
    assert path.exists()


def test_a_folder_that_can_not_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "programs")
    assert store.keep(KEY, {}, PAYLOAD) == "can't be written (Not a directory)"
    assert store.find(KEY).entry is None


def test_the_entries_longest_unused_make_room_for_new_ones(tmp_path):
    store = Store(tmp_path, most_bytes=3 * (len(PAYLOAD) + 400))
    keys = [Key("Net", {"model": str(i)}) for i in range(4)]
    for age, key in enumerate(keys[:3]):
        store.keep(key, {}, PAYLOAD)
        os.utime(store.paths()[-1], (age, age))
    assert store.find(keys[0]).entry is not None  # used just now: no longer the oldest
    store.keep(keys[3], {}, PAYLOAD)
    there = [store.find(key).entry is not None for key in keys]
    assert there == [True, False, True, True]


def test_processes_that_write_and_read_one_entry_at_once_see_it_whole_or_not_at_all(tmp_path):
    wrong, payloads = [], [bytes([i]) * 50_000 for i in range(4)]

    def work(payload):
        store = Store(tmp_path)
        for _ in range(20):
            store.keep(KEY, {}, payload)
            found = store.find(KEY)
            if found.entry is None or found.entry.payload not in payloads:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(payload,)) for payload in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(list(tmp_path.iterdir())) == 1


def test_clearing_counts_what_it_removes(store):
    size = only_file(store).stat().st_size
    (store.folder / "left.new").write_bytes(b"abc")
    (store.folder / "a user's own.txt").write_text("stays")
    assert store.clear() == (2, size + 3)
    assert [path.name for path in store.folder.iterdir()] == ["a user's own.txt"]


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.setenv("AUTOSHARD_CACHE", "off")
    assert default_folder() is None
    monkeypatch.delenv("AUTOSHARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(default_folder()) == "/x/autoshard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder().parts[-2:] == (".cache", "autoshard")
