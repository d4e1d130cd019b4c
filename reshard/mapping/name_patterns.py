"""Names by pattern: `layers.{i}.attention.wq.{kind}`, and where in a checkpoint's keys such a name can stand.

`{word}` is one part of a dotted name, or a piece of one; `{word+}` is one part or more. The word after `over` of a
rule stands for a number. A rule speaks of parameters; a key may also be a parameter within a section, or a state of it:

    model.<name>          optim.state.<name>.exp_avg          optimizer.state.exp_avg.<name>
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from reshard.errors import NormalizationError

__all__ = ["Pattern", "Site", "sites"]

_WORD = re.compile(r"\{([A-Za-z_]\w*)(\+?)\}")


@dataclass(frozen=True)
class Pattern:
    """A pattern of names; `number` is the word that stands for a number."""

    text: str
    number: str | None = None

    def __post_init__(self) -> None:
        """Raises NormalizationError for braces that hold no word, and for a word that occurs twice."""
        rest = _WORD.sub("", self.text)
        if "{" in rest or "}" in rest:
            raise NormalizationError(f"the pattern {self.text!r} has a brace that holds no word")
        if len(set(self.words)) != len(self.words):
            raise NormalizationError(f"the pattern {self.text!r} has one word twice")

    @property
    def words(self) -> tuple[str, ...]:
        """The words in it."""
        return tuple(match[1] for match in _WORD.finditer(self.text))

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Matches a whole name; the words are its groups."""
        out, at = "", 0
        for match in _WORD.finditer(self.text):
            out += re.escape(self.text[at : match.start()])
            inner = r"\d+" if match[1] == self.number else r".+" if match[2] else r"[^.]+"
            out += f"(?P<{match[1]}>{inner})"
            at = match.end()
        return re.compile(out + re.escape(self.text[at:]))

    def match(self, name: str) -> dict[str, str] | None:
        """What the words stand for, or None."""
        found = self.regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, words: Mapping[str, str]) -> str:
        """The name where the words stand for these. Raises NormalizationError for a word that is not given."""

        def value(match: re.Match[str]) -> str:
            if match[1] not in words:
                raise NormalizationError(f"nothing says what {{{match[1]}}} in {self.text!r} stands for")
            return words[match[1]]

        return _WORD.sub(value, self.text)


@dataclass(frozen=True)
class Site:
    """A parameter's name within a key: `prefix + name + suffix`."""

    prefix: str
    name: str
    suffix: str = ""
    is_state: bool = False
    """Whether the value belongs to an optimizer and may have another shape than the parameter."""

    @property
    def state(self) -> str:
        """What the state is called, such as "exp_avg"; "" for a parameter."""
        if not self.is_state:
            return ""
        return self.suffix[1:] or self.prefix.removesuffix("module.").rstrip(".").rpartition(".")[2]

    def key(self, name: str) -> str:
        """The key of another parameter at the same site."""
        return f"{self.prefix}{name}{self.suffix}"


_SECTION = re.compile(r"(?:(?:model|module|state_dict|app|net)\.)+")
_STATE = re.compile(r"(.*?\b(?:optim|optimizers?|optimizer_\d+)(?:\.\d+)?\.(?:state|param_groups)\.)(.+)(\.[^.]+)")
_GROUP = re.compile(r"\d+(\.|$)")
_STATE_FIRST = re.compile(r"(.*?\b(?:optim|optimizers?|optimizer_\d+)(?:\.\d+)?\.state\.[^.]+\.(?:module\.)?)(.+)")


def sites(key: str) -> Iterator[Site]:
    """Every way in which a key can be read: as a state of a parameter, as a name, as a name within a section."""
    state = _STATE.fullmatch(key)
    numbered = state is not None and state[1].endswith(".param_groups.") and _GROUP.match(state[2])
    if state is not None and not numbered:  # settings of a numbered group belong to no parameter
        yield Site(state[1], state[2], state[3], True)
    first = _STATE_FIRST.fullmatch(key)
    if first is not None:
        yield Site(first[1], first[2], "", True)
    yield Site("", key)
    section = _SECTION.match(key)
    while section is not None:
        prefix = section[0] if section.end() < len(key) else ""
        if prefix:
            yield Site(prefix, key[len(prefix) :])
        shorter = prefix.rstrip(".").rpartition(".")[0]
        section = _SECTION.fullmatch(shorter + ".") if shorter else None
