"""Whether the members of process groups entered the same operations. Pure.

Each rank describes every operation that it begins: its name, and those of shape, dtype, reduction and root that must be
equal on all members (`meshbook.groups.operands`). Per group it keeps a *digest* of all of these, with their number, and
the last ones. Digests travel with its answers to calls. Equal digests at equal numbers are equal operations; where they
differ the ranks are asked for their last operations, and `find_disagreements` says which one they disagree in.

    rank 0   1 all_reduce (5,)     2 barrier        digest at 2: a
    rank 1   1 all_reduce (4,)     2 barrier        digest at 2: b      asked: they disagree in operation 1

Likewise for a message between two members: the digests of the sender and of the receiver are compared. For an
all_to_all the weights of the parts are summed, once all members have told theirs: 0 where it matches.

Ranks that are not equally far prove nothing by their digests, so digests of several numbers are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from meshbook.formatting import group_ranks, name_ranks
from meshbook.groups.progress import Collectives, Entered, GroupProgress, Messages

KEPT_NUMBERS = 64
"""The number of newest digests that are kept per group."""
_WEIGHTS = 1 << 64


class Progress(NamedTuple):
    """The progress of one group on one rank, or of the messages from one member to another; it travels with answers."""

    group: str
    number: int
    digest: int


class Splits(NamedTuple):
    """The operations of one group in which each pair of members has a size of its own; as it travels with answers."""

    group: str
    number: int
    """The count of such operations."""
    weight: int
    """The weights of all members add up to 0, modulo 2 ** 64, where each gives as much as the others take."""
    members: int


class Told(NamedTuple):
    """The news of groups that travels with the answer of a rank that has used them since its last answer."""

    epoch: int
    groups: tuple[Progress, ...]
    torn: tuple[str, ...] = ()
    """The texts on tensors that abandoned operations left half done for good: ``x may be half reduced``."""
    copied: tuple[str, ...] = ()
    """The same texts on tensors with a copy, which is put back when the groups are formed again."""
    restored: tuple[str, ...] = ()
    """The texts of ``copied`` whose tensors are as they were before, by now."""
    broken: bool = False
    """Groups have become of no use, or the default one was destroyed."""
    splits: tuple[Splits, ...] = ()


encode_told = msgspec.msgpack.Encoder().encode
decode_told = msgspec.msgpack.Decoder(Told).decode


class Disagreement(NamedTuple):
    """Members of a group entered different operations under the same number."""

    group: str
    number: int
    """0: between two of them."""
    ranks: tuple[int, ...]
    text: str
    """``ranks 0 and 1-7 disagree in all_reduce (cell 9, line 4): (5,) against (4,)``"""


class Agreements:
    """The comparison of the news that came with the answers of one mesh's ranks."""

    def __init__(self) -> None:
        self.doubted = False
        """Digests differ: the ranks should be asked."""
        self._epoch = -1
        self._digests: dict[str, dict[int, int]] = {}
        """Per group: number to the digest of the rank that told first."""
        self._weights: dict[str, dict[int, dict[int, int]]] = {}
        """Per group: number to the weight of each rank."""

    def compare(self, rank: int, told: Told) -> None:
        """Note the report that came with an answer of ``rank``."""
        if told.epoch != self._epoch:
            if told.epoch < self._epoch:
                return  # of groups that are no more
            self.clear()
            self._epoch = told.epoch
        for group, number, digest in told.groups:
            digests = self._digests.setdefault(group, {})
            if digests.setdefault(number, digest) != digest:
                self.doubted = True
            if len(digests) > KEPT_NUMBERS:
                del digests[next(iter(digests))]
        for group, number, weight, members in told.splits:
            numbers = self._weights.setdefault(group, {})
            weights = numbers.setdefault(number, {})
            weights[rank] = weight
            if len(weights) == members and sum(weights.values()) % _WEIGHTS:
                self.doubted = True
            if len(numbers) > KEPT_NUMBERS:
                del numbers[next(iter(numbers))]

    def clear(self) -> None:
        """Forget the notes, since the ranks were asked."""
        self.doubted = False
        self._digests.clear()
        self._weights.clear()


def find_disagreements(snapshots: Mapping[int, Collectives]) -> list[Disagreement]:
    """The first disagreement of each group, as far back as its members remember.

    Snapshots need not be of one moment: a rank's operation of a number stays the same within an epoch.
    """
    groups: dict[tuple[str, int], dict[int, GroupProgress]] = {}
    for rank, told in snapshots.items():
        for group in told.groups:
            groups.setdefault((group.name, group.epoch), {})[rank] = group
    newest: dict[str, int] = {}
    for name, epoch in groups:
        newest[name] = max(epoch, newest.get(name, epoch))
    found = [_find_in(name, groups[name, epoch]) for name, epoch in newest.items()]
    return [disagreement for disagreement in found if disagreement is not None]


def _find_in(name: str, members: Mapping[int, GroupProgress]) -> Disagreement | None:
    entered: dict[int, dict[int, Entered]] = {}
    for rank, group in sorted(members.items()):
        for each in group.recent:
            entered.setdefault(each.number, {})[rank] = each
    for number, ranks in sorted(entered.items()):
        if len({each.code for each in ranks.values()}) > 1:
            return Disagreement(name, number, tuple(ranks), _describe(number, ranks))
        if found := _find_between_parts(name, number, next(iter(members.values())).members, ranks):
            return found
    return _find_between(name, members) or _find_long_ago(name, members)


def _find_between_parts(
    name: str, number: int, members: tuple[int, ...], entered: Mapping[int, Entered]
) -> Disagreement | None:
    """Compare the parts that members of an all_to_all gave with those that the others took."""
    parts = {at: entered[rank].parts for at, rank in enumerate(members) if rank in entered}
    told = {at: each for at, each in parts.items() if each is not None}
    pairs = [(i, j) for i, j in itertools.product(told, told) if told[i].given[j] != told[j].taken[i]]
    if not pairs:
        return None
    giver, taker = pairs[0]
    gives, takes = entered[members[giver]], entered[members[taker]]
    places = [f" ({each.place})" if each.place else "" for each in (gives, takes)]
    text = (
        f"rank {members[giver]} gives {told[giver].given[taker]} x {gives.values[1]} to rank {members[taker]} in "
        f"{gives.operation}{places[0]}, which takes {told[taker].taken[giver]} x {takes.values[1]}"
        f"{places[1] if places[0] != places[1] else ''}{_more_pairs(len(pairs) - 1)}"
    )
    return Disagreement(name, number, tuple(sorted({members[at] for pair in pairs for at in pair})), text)


def _more_pairs(count: int) -> str:
    return f"\n  and so {count} more pair{'s' if count > 1 else ''} of ranks" if count else ""


def _find_between(name: str, members: Mapping[int, GroupProgress]) -> Disagreement | None:
    """Compare the messages that members sent with the messages that others received."""
    pairs: dict[tuple[int, int], dict[int, Messages]] = {}
    for rank, group in sorted(members.items()):
        for each in group.messages:
            pairs.setdefault((each.sender, each.receiver), {})[rank] = each
    texts: dict[tuple[int, int], str] = {}
    for (sender, receiver), told in sorted(pairs.items()):
        if sender in told and receiver in told and (text := _compare_messages(told[sender], told[receiver])):
            texts[sender, receiver] = text
    if not texts:
        return None
    first, *others = texts.values()
    text = first + _more_pairs(len(others))
    return Disagreement(name, 0, tuple(sorted({rank for pair in texts for rank in pair})), text)


def _compare_messages(sent: Messages, received: Messages) -> str:
    """``rank 0 sent 4 x float32 to rank 1 (cell 9, line 2), which received 5 x float32 (cell 9, line 3)``"""
    by_number = {each.number: each for each in received.recent}
    for each in sent.recent:
        other = by_number.get(each.number, each)
        if other.code != each.code:
            places = [f" ({place})" if place else "" for place in (each.place, other.place)]
            what = f"rank {sent.sender} sent {each.values[0]} to rank {sent.receiver}{places[0]}"
            return f"{what}, which received {other.values[0]}{places[1]}"
    if sent.number == received.number and sent.digest != received.digest:
        return f"rank {sent.receiver} received something else than rank {sent.sender} sent it, some messages ago"
    return ""


def _find_long_ago(name: str, members: Mapping[int, GroupProgress]) -> Disagreement | None:
    """Compare the digests alone, for operations that no rank remembers."""
    for number, ranks in group_ranks((rank, group.number) for rank, group in sorted(members.items())).items():
        parties = list(group_ranks((rank, members[rank].digest) for rank in ranks).values())
        if len(parties) > 1:
            text = f'{_and(parties)} disagree in one of the first {number} operations of group "{name}"'
            return Disagreement(name, number, tuple(itertools.chain.from_iterable(parties)), text)
    return None


def _describe(number: int, entered: Mapping[int, Entered]) -> str:
    parties = list(group_ranks((rank, each.code) for rank, each in entered.items()).values())
    first = [entered[ranks[0]] for ranks in parties]
    operations = [each.operation for each in first]
    if len(set(operations)) == 1:
        values = [[each.values[at] for each in first] for at in range(len(first[0].values))]
        against = [" against ".join(dict.fromkeys(each)) for each in values if len(set(each)) > 1]
        what, how = operations[0], ", ".join(against)
    else:
        what, how = f"operation {number}", " against ".join(dict.fromkeys(operations))
    places = [each.place for each in first]
    if len(set(places)) == 1:
        return f"{_and(parties)} disagree in {what}{f' ({places[0]})' if places[0] else ''}: {how}"
    where = ", ".join(f"{name_ranks(ranks)} at {place or '?'}" for ranks, place in zip(parties, places, strict=True))
    return f"{_and(parties)} disagree in {what}: {how}\n  {where}"


def _and(parties: Iterable[Iterable[int]]) -> str:
    """Name all parties: ``ranks 0 and 1-7``."""
    first, *others = [name_ranks(ranks) for ranks in parties]
    rest = [other.split(" ", 1)[1] for other in others]
    return f"ranks {' and '.join([first.split(' ', 1)[1], *rest])}"
