"""What both sides are asked: one long system prompt, and a text with a question of its own for each request.

The sizes follow what the figures are claimed for: a system prompt that is most of the prompt. Every text is made from
the words here by arithmetic on the request's number, so that two runs, and the two sides of one, are asked the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from kv_services.engine.interface import ChatMessage
from kv_services.kvctl.demo.prompts import SYSTEM_PROMPT

_KINDS = ("book", "map", "letter", "drawing", "diary", "almanac", "song book", "newspaper", "atlas", "herbal", "chart")
_ABOUT = (
    "rivers",
    "bees",
    "bridges",
    "winter",
    "ships",
    "clocks",
    "bread",
    "stars",
    "horses",
    "glass",
    "salt",
    "wells",
    "trees",
)
_PEOPLE = (
    "a miller",
    "two sisters",
    "a sailor",
    "the mayor",
    "a teacher",
    "a gardener",
    "an old doctor",
    "a baker",
    "a weaver",
)
_DEEDS = (
    "walked to the river before sunrise and counted the boats",
    "repaired the roof of the school with boards from the harbour",
    "wrote down how much rain fell and how high the water stood",
    "sold three baskets of apples and bought a lamp and some oil",
    "asked everybody in the village who had seen the missing goat",
    "planted a row of lime trees where the old wall had been",
    "measured the shadow of the tower at noon and drew it on a map",
)
_ASKED = (
    "What happened, in your own words, and why did they do it?",
    "Who is the most important person in this text, and why?",
    "What could have happened on the day after that?",
    "Which of these things would you do first, and what would you need for it?",
    "What can a child learn from this text?",
)


@dataclass(frozen=True, slots=True)
class Questions:
    """Chats of about the same length, equal up to the end of the system prompt.

    Attributes:
        shared: tokens of the system prompt.
        longest: tokens of the longest of the prompts that were made.
    """

    chats: Sequence[Sequence[ChatMessage]]
    shared: int
    longest: int


def make_questions(
    encode: Callable[[Sequence[ChatMessage]], Sequence[int]], number: int, shared_tokens: int, own_tokens: int
) -> Questions:
    """So many different chats.

    Args:
        encode: the model's way to make tokens of a chat.
        shared_tokens: about how many the system prompt has.
        own_tokens: about how many each user's message has.
    """
    system = _grown(
        SYSTEM_PROMPT[: shared_tokens * 4], _shelf, lambda text: len(encode(_chat(text, ""))) >= shared_tokens
    )
    shared = len(encode(_chat(system, "")))
    chats = [_own(encode, system, shared + own_tokens, seed) for seed in range(number)]
    return Questions(chats, shared, max(len(encode(chat)) for chat in chats))


def _own(
    encode: Callable[[Sequence[ChatMessage]], Sequence[int]], system: str, tokens: int, seed: int
) -> Sequence[ChatMessage]:
    question = _ASKED[seed % len(_ASKED)]

    def chat(text: str) -> Sequence[ChatMessage]:
        return _chat(system, f"{text}\n\n{question}")

    text = _grown(
        f"Visitor {seed + 1} has found this:\n",
        lambda line: _event(seed * 31 + line),
        lambda grown: len(encode(chat(grown))) >= tokens,
    )
    return chat(text)


def _chat(system: str, user: str) -> Sequence[ChatMessage]:
    return [ChatMessage("system", system), ChatMessage("user", user)]


def _grown(text: str, line: Callable[[int], str], enough: Callable[[str], bool]) -> str:
    for number in count():
        if enough(text):
            break
        text += line(number)
    return text


def _shelf(number: int) -> str:
    kind, about = _KINDS[number % len(_KINDS)], _ABOUT[number % len(_ABOUT)]
    if number == 0:
        return f"\n\nWhat stands on your shelves:\nShelf 1: a {kind} about {about}."
    return f"\nShelf {number + 1}: a {kind} about {about}, given by {_PEOPLE[number % len(_PEOPLE)]}."


def _event(number: int) -> str:
    who, deed = _PEOPLE[number * 5 % len(_PEOPLE)], _DEEDS[number * 3 % len(_DEEDS)]
    return f"On day {number % 28 + 1}, {who} {deed}. "
