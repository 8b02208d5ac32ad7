"""Words and sentences that tasks are made of."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

ADJECTIVES = """able amber ancient arctic bitter blue bold brave brief bright broad calm careful cheap clean clever cold
common crisp curious dark deep dense direct dry dusty eager early easy empty equal exact fair faint famous fast fierce
final firm flat fresh gentle giant glad golden grand gray great green happy hard heavy hidden hollow honest huge humble
icy ideal idle jolly keen kind large late lazy level light lively local lonely loose loud loyal lucky mellow mild minor
modern narrow neat noble noisy odd old open orange pale patient plain polite proud pure purple quick quiet rapid rare
ready red rich rough round royal rural sad safe sandy sharp shiny short shy silent silver simple slim slow small smooth
soft solid sour stable steady steep stiff still stormy strict strong sunny sweet swift tall tame tender thick thin tidy
tiny tough true urban usual vast vivid warm weak wet white whole wide wild wise wooden yellow young""".split()

NOUNS = """acorn actor album anchor apple apron arrow atlas author badge baker balloon banner barrel basket beach beacon
beetle bell bench bicycle blanket board boat bottle boulder bowl branch bread brick bridge broom bucket button cabin
cactus camera candle canyon carpet castle cellar chain chair cherry circle clock cloud coast coffee collar comet copper
corner cotton cradle crane crayon creek crown curtain dancer desert desk diamond doctor dolphin donkey door dragon
drawer drum eagle engine falcon farmer feather fence ferry field flag flute forest fountain fox garden garlic gate
ginger glacier glove goat guitar hammer harbor hazel hedge helmet hill hotel island ivory jacket jewel kettle kitchen
kite ladder lake lantern leather lemon letter library lion lizard magnet mango maple market meadow mirror monkey
mountain museum needle nest novel oak ocean olive onion orchard otter oven owl paddle painter palace panda paper parrot
pebble pencil pepper piano pillow pilot pine planet pocket pond poet potato prairie pyramid rabbit radio raven ribbon
river robin rocket roof rope saddle sailor salmon scarf school shadow shell ship shovel signal singer spider spoon
squirrel station stone storm street summit swan table teacher temple theater thunder ticket tiger tower train tulip
tunnel turtle umbrella valley vessel village violin wagon walnut water whale wheel willow window winter wolf zebra
""".split()

NOISE = (
    "The meadow is green and the air above it is clear.",
    "The road bends to the left and then to the right.",
    "Here is a hill, and there is another one behind it.",
    "The morning was quiet and nobody was in a hurry.",
    "We go up the stairs and we come down again.",
)


def compound(draw: random.Random) -> str:
    return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"


def distinct(draw: random.Random, count: int, make) -> list:
    """`count` different values of make(draw)."""
    found: dict = {}
    while len(found) < count:
        found[make(draw)] = None
    return list(found)


def plain_words(draw: random.Random, count: int) -> list[str]:
    """Different words; pairs of words, all of them, where there are not that many."""
    singles = sorted({*ADJECTIVES, *NOUNS})
    return draw.sample(singles, count) if count <= len(singles) else distinct(draw, count, compound)


def sentences(path: Path) -> list[str]:
    """The sentences of a text file, for haystacks."""
    text = " ".join(path.read_text().split())
    found = [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence]
    if not found:
        raise SystemExit(f"--haystack {path}: the file has no text")
    return found


def haystack(draw: random.Random, source: Sequence[str], count: int) -> list[str]:
    """`count` sentences in the order of the source, from a random one on, starting again at its end."""
    start = draw.randrange(len(source))
    return [source[(start + i) % len(source)] for i in range(count)]


def scatter(draw: random.Random, units: Sequence[str], filler: Sequence[str], ordered: bool = False) -> list[str]:
    """All units among the filler, each at a random place; in the given order if `ordered`."""
    places = [draw.random() for _ in units]
    if ordered:
        places.sort()
    spread = [((i + 0.5) / max(1, len(filler)), text) for i, text in enumerate(filler)]
    merged = sorted([*spread, *zip(places, units, strict=True)], key=lambda pair: pair[0])
    return [text for _, text in merged]
