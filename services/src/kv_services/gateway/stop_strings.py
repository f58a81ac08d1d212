"""Decides where a text that arrives in pieces must end, and how much of it may be shown before that is known.

An Aho-Corasick automaton (Aho and Corasick, 1975) over the stop strings, fed one character at a time. Pure.

T1: the result depends on the text alone, not on how it was cut: the text ends at the first character that completes
    a stop string, and is cut before the longest stop string that ends there.
T2: what was released never contains a stop string, nor the beginning of the one that ended the text.
T3: what is held back is the longest end of the text that begins a stop string, so less than the longest of them.
"""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """One text being searched; stop strings must not be empty."""

    __slots__ = ("_depth", "_fail", "_goto", "_held", "_match", "_node", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would end every text before it begins")
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._goto)
        self._link()
        self._node = 0
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Take the next piece; gives what may be shown now. After a match (`matched`) nothing more is shown."""
        if self.matched:
            return ""
        if len(self._goto) == 1:
            return text
        node = self._node
        for index, char in enumerate(text):
            while node and char not in self._goto[node]:
                node = self._fail[node]
            node = self._goto[node].get(char, 0)
            if self._match[node]:
                whole = self._held + text[: index + 1]
                self._held, self.matched = "", True
                return whole[: len(whole) - self._match[node]]
        self._node = node
        whole = self._held + text
        border = len(whole) - self._depth[node]
        self._held = whole[border:]
        return whole[:border]

    def flush(self) -> str:
        """The text is over without a match: what was held back was only the beginning of a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._goto[node]:
                self._goto[node][char] = len(self._goto)
                self._goto.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(0)
            node = self._goto[node][char]
        self._match[node] = len(stop)

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._goto[node].items():
                queue.append(child)
                back = self._fail[node]
                while back and char not in self._goto[back]:
                    back = self._fail[back]
                self._fail[child] = self._goto[back].get(char, 0)
                # A node's own stop string is longer than any that ends in its suffixes.
                self._match[child] = self._match[child] or self._match[self._fail[child]]
