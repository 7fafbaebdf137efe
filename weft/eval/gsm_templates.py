"""Sentence templates of the gsm-mini task, split by construction into a training side and a held-out side.

A template is one choice of (join, frame, verb, tail). The id is the group name with these four indices. A
hash of the id puts about one in six templates on the test side. A held-out sentence is therefore a new
combination of words that all occur in training.

Mark-up inside templates:
    ``{name}``            a slot (person, number, item ...), filled by the story.
    ``[buy|buys|bought]`` picked by plural present, singular present, past.
    ``[do|does]``         picked by plural, singular.

A story's text carries no final stop: each join starts with the stop, or with the word that continues the
sentence.
"""

import hashlib
import itertools
from dataclasses import dataclass

HELD_OUT_TEMPLATE_MODULUS = 6


@dataclass(frozen=True, slots=True)
class Template:
    """One sentence template: id and marked-up text."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class TemplateGroup:
    """The templates of one kind of sentence, by side."""

    name: str
    train: tuple[Template, ...]
    test: tuple[Template, ...]


def stable_hash(text: str) -> int:
    """Return a 64-bit hash of ``text``, equal on every platform and Python version."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_held_out_template(template_id: str) -> bool:
    """Return True if a template id belongs to the test side."""
    return stable_hash("gsm-mini template " + template_id) % HELD_OUT_TEMPLATE_MODULUS == 0


def group(
    name: str,
    joins: tuple[str, ...],
    frames: tuple[str, ...],
    verbs: tuple[str, ...] = ("",),
    tails: tuple[str, ...] = ("",),
) -> TemplateGroup:
    """Return a group with every choice of (join, frame, verb, tail), split by side."""
    sides: dict[bool, list[Template]] = {False: [], True: []}
    parts = itertools.product(enumerate(joins), enumerate(frames), enumerate(verbs), enumerate(tails))
    for (i, join), (j, frame), (k, verb), (m, tail) in parts:
        template = Template(f"{name}:{i}.{j}.{k}.{m}", join + frame.replace("<v>", verb) + tail)
        sides[is_held_out_template(template.id)].append(template)
    return TemplateGroup(name, tuple(sides[False]), tuple(sides[True]))


# ---------------------------------------------------------------------- joins

_SENTENCE = (
    ". {Subj} ", ". Then {subj} ", ". Later, {subj} ", ". The next day, {subj} ", ". After that, {subj} ",
    ". {Name} ",
)  # fmt: skip
_GAIN_JOINS = (" and ", " and then ", ", then ", *_SENTENCE)
_LOSS_JOINS = (" and ", " and then ", ", then ", " but ", *_SENTENCE)
_NEXT = (". {Subj} ", ". Then {subj} ", ". Now {subj} ", ". {Name} ", " and ", ". In the end, {subj} ")
_ASK = (
    ". How many", ". Now how many", ". In the end, how many", ". So how many", ". Then how many",
    ". After all this, how many",
)  # fmt: skip
_COST = (". How much", ". So how much", ". In the end, how much", ". After this, how much")

_TIMES = ("", " on Monday", " in the morning", " today", " at school", " at night")
_SHOP = ("", " at the store", " at the market", " from a shop", " on the way home")

# ---------------------------------------------------------------------- openings

OPEN_HAS = group(
    "open-has", ("", "At first, ", "Today, ", "In the morning, "), ("{Name} <v> {a} {items}",),
    ("[have|has|had]", "[own|owns|owned]", "[have|has|had] a total of", "[start|starts|started] with",
     "[keep|keeps|kept]"),
    ("", " in a box", " at home", " in a bag", " on the table", " in a drawer"),
)  # fmt: skip
OPEN_GETS = group(
    "open-gets", ("", "At first, ", "One day, ", "In the morning, "), ("{Name} <v> {a} {items}",),
    ("[buy|buys|bought]", "[find|finds|found]", "[collect|collects|collected]", "[get|gets|got]",
     "[make|makes|made]", "[pick|picks|picked]"),
    ("", " at home", " on Monday", " at the market", " in the park"),
)  # fmt: skip
OPEN_GROUPS = group(
    "open-groups", ("", "One day, ", "In the morning, "),
    ("{Name} <v> {a} {containers} of {b} {items}", "{Name} <v> {a} {containers} with {b} {items} in each",
     "{Name} <v> {a} {containers} with {b} {items} each",
     "{Name} <v> {a} {containers}. Each {container} has {b} {items}",
     "{Name} <v> {a} {containers}. There are {b} {items} in each {container}",
     "{Name} <v> {a} {containers}. Each {container} holds {b} {items}"),
    ("[have|has|had]", "[buy|buys|bought]", "[get|gets|got]", "[own|owns|owned]", "[find|finds|found]"),
)  # fmt: skip
OPEN_RATE = group(
    "open-rate", ("", "At school, ", "At work, "),
    ("{Name} <v> {b} {items} every day for {a} days", "{Name} <v> {b} {items} a day for {a} days",
     "{Name} <v> {b} {items} each week for {a} weeks", "for {a} days, {Name} <v> {b} {items} each day",
     "{Name} <v> {b} {items} per hour for {a} hours"),
    ("[make|makes|made]", "[collect|collects|collected]", "[find|finds|found]", "[buy|buys|bought]",
     "[get|gets|got]"),
)  # fmt: skip
OPEN_TWO = group(
    "open-two", ("", "One day, "),
    ("{Name} <v> {a} {items} in the morning and {b} in the afternoon",
     "{Name} <v> {a} {items} on Monday and {b} on Tuesday",
     "{Name} <v> {a} {items} on Monday and {b} more on Tuesday",
     "{Name} <v> {a} red {items} and {b} blue {items}", "{Name} <v> {a} big {items} and {b} small {items}"),
    ("[make|makes|made]", "[collect|collects|collected]", "[find|finds|found]", "[buy|buys|bought]",
     "[get|gets|got]", "[have|has|had]"),
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- steps

GAIN = group(
    "gain", _GAIN_JOINS,
    ("<v> {b} more", "<v> {b} more {items}", "<v> another {b} {items}", "<v> {b} {items}"),
    ("[buy|buys|bought]", "[get|gets|got]", "[find|finds|found]", "[collect|collects|collected]",
     "[win|wins|won]", "[receive|receives|received]", "[make|makes|made]", "[pick|picks|picked] up",
     "[take|takes|took] home", "[gain|gains|gained]"),
    (*_SHOP, " from {Other}"),
)  # fmt: skip
GIVEN = group(
    "given", (". Then ", ". Later, ", ". ", ". The next day, ", " and "),
    ("{Other} <v> {obj} {b} more", "{Other} <v> {obj} {b} {items}", "{Other} <v> {obj} {b} more {items}",
     "{Other} <v> {b} {items} to {obj}"),
    ("{gives}", "{brings}", "{sends}", "{hands}"), ("", " as a gift"),
)  # fmt: skip
LOSS = group(
    "loss", _LOSS_JOINS, ("<v> {b}", "<v> {b} of them", "<v> {b} {items}", "<v> {b} of the {items}"),
    ("[lose|loses|lost]", "[sell|sells|sold]", "[use|uses|used]", "[drop|drops|dropped]",
     "[break|breaks|broke]", "[throw|throws|threw] away", "[give|gives|gave] away",
     "[donate|donates|donated]", "[return|returns|returned]"),
    _TIMES,
)  # fmt: skip
EAT = group(
    "eat", _LOSS_JOINS, ("<v> {b}", "<v> {b} of them", "<v> {b} {items}", "<v> {b} of the {items}"),
    ("[eat|eats|ate]", "[cook|cooks|cooked]"), (*_TIMES, " for lunch"),
)  # fmt: skip
GIVE = group(
    "give", _LOSS_JOINS,
    ("<v> {b} to {Other}", "<v> {b} {items} to {Other}", "<v> {b} of them to {Other}",
     "<v> {Other} {b} {items}", "<v> {Other} {b} of them"),
    ("[give|gives|gave]", "[sell|sells|sold]", "[send|sends|sent]", "[lend|lends|lent]",
     "[hand|hands|handed]"),
    ("", " at school", " at lunch"),
)  # fmt: skip
GIVE_EACH = group(
    "give-each", _LOSS_JOINS,
    ("<v> {c} {items} to each of {d} friends", "<v> {c} to each of {d} friends",
     "<v> {d} friends {c} {items} each", "<v> {c} {items} each to {d} people"),
    ("[give|gives|gave]", "[hand|hands|handed]", "[send|sends|sent]"),
)  # fmt: skip
GAIN_GROUPS = group(
    "gain-groups", _GAIN_JOINS,
    ("<v> {c} {containers} of {d} {items}", "<v> {c} more {containers} of {d} {items}",
     "<v> {c} {containers} with {d} {items} in each", "<v> {c} {containers} with {d} {items} each"),
    ("[buy|buys|bought]", "[get|gets|got]", "[find|finds|found]", "[win|wins|won]"),
)  # fmt: skip
MULTIPLY = group(
    "multiply", _NEXT,
    ("<v> the number of {items}", "<v> {poss} {items}", "<v> the number of {poss} {items}"),
    ("{times_verb}",), ("", " by the end of the week", " in a month"),
)  # fmt: skip
HALF = group(
    "half", _LOSS_JOINS, ("<v> half of them", "<v> half of the {items}", "<v> half of {poss} {items}"),
    ("[lose|loses|lost]", "[sell|sells|sold]", "[use|uses|used]", "[give|gives|gave] away",
     "[donate|donates|donated]"),
    ("", " today", " to {Other}"),
)  # fmt: skip

# ---------------------------------------------------------------------- questions

_WHO = (" [do|does] {subj} have", " [do|does] {Name} have")
ASK_GAIN = group(
    "ask-gain", _ASK, tuple(" {items}" + w for w in _WHO), ("",),
    ("?", " now?", " in total?", " in all?", " altogether?", " at the end?"),
)  # fmt: skip
ASK_LOSS = group(
    "ask-loss", _ASK, (*(" {items}" + w for w in _WHO), " [do|does] {subj} have"), ("",),
    ("?", " now?", " left?", " at the end?"),
)  # fmt: skip
ASK_LEFT = group(
    "ask-left", _ASK, (" {items} are <v>",), ("left", "left over", "still there"),
    ("?", " now?", " at the end?"),
)  # fmt: skip
SHARE = group(
    "share", _NEXT,
    ("[share|shares|shared] <v> equally among {b} friends. How many {items} does each friend get?",
     "[share|shares|shared] <v> equally with {b} friends so that each of the {b} friends gets the same."
     " How many does each get?",
     "[divide|divides|divided] <v> equally among {b} people. How many {items} does each person get?",
     "[split|splits|split] <v> equally into {b} groups. How many {items} are in each group?",
     "[put|puts|put] <v> equally into {b} {containers}. How many {items} are in each {container}?",
     "[pack|packs|packed] <v> into {containers} of {b}. How many {containers} [do|does] {subj} fill?",
     "[pack|packs|packed] <v> into {containers} with {b} in each."
     " How many {containers} [do|does] {subj} need?"),
    ("them", "the {items}", "all of them", "all the {items}", "{poss} {items}"),
)  # fmt: skip
SELL_ALL = group(
    "sell-all", _NEXT, ("[sell|sells|sold] <v> for ${b} each", "[sell|sells|sold] <v> at ${b} each"),
    ("them", "the {items}", "all of them", "all the {items}"),
    (". How much money [do|does] {subj} get?", ". How much [do|does] {subj} earn?",
     ". How much money [do|does] {Name} make?", ". How many dollars [do|does] {subj} get?"),
)  # fmt: skip
WANT = group(
    "want", (". {Subj} ", " but ", ". Now {subj} ", ". {Name} "),
    ("<v> {b}", "<v> {b} {items}", "<v> a total of {b} {items}"),
    ("[want|wants|wanted]", "[need|needs|needed]", "[want|wants|wanted] to have",
     "[would like|would like|wanted]"),
    (". How many more [do|does] {subj} need?", ". How many more {items} [do|does] {subj} need?",
     ". How many {items} are still missing?", ". How many more {items} must {subj} get?"),
)  # fmt: skip

# ---------------------------------------------------------------------- comparisons

COMPARE_FIRST = group(
    "compare-first", ("", "At school, ", "Today, ", "On Monday, "), ("{Name} <v> {a} {items}",),
    ("[have|has|had]", "[own|owns|owned]", "[collect|collects|collected]", "[buy|buys|bought]",
     "[find|finds|found]"),
)  # fmt: skip
_OTHER_VERBS = ("{has}", "{owns}", "{collects}", "{buys}", "{finds}")
COMPARE_MORE = group(
    "compare-more", (". ", " and ", ". Now ", ". {Other}'s friend says that "),
    ("{Other} <v> {b} more {items} than {Name}", "{Other} <v> {b} more than {Name}",
     "{Other} <v> {b} {items} more than {Name}"),
    _OTHER_VERBS,
)  # fmt: skip
COMPARE_FEWER = group(
    "compare-fewer", (". ", " and ", ". Now ", ". {Other}'s friend says that "),
    ("{Other} <v> {b} fewer {items} than {Name}", "{Other} <v> {b} fewer than {Name}",
     "{Other} <v> {b} less than {Name}", "{Other} <v> {b} {items} fewer than {Name}"),
    _OTHER_VERBS,
)  # fmt: skip
COMPARE_TIMES = group(
    "compare-times", (". ", " and ", ". Now ", ". {Other}'s friend says that "),
    ("{Other} <v> {times} as many {items} as {Name}", "{Other} <v> {times} as many as {Name}",
     "{Other} <v> {times} the number of {items} that {Name} [have|has|had]"),
    _OTHER_VERBS,
)  # fmt: skip
COMPARE_HALF = group(
    "compare-half", (". ", " and ", ". Now "),
    ("{Other} <v> half as many {items} as {Name}", "{Other} <v> half as many as {Name}"), _OTHER_VERBS,
)  # fmt: skip
COMPARE_PLAIN = group(
    "compare-plain", (". ", " and ", ", while ", ", and "),
    ("{Other} <v> {b} {items}", "{Other} <v> {b}", "{Other} <v> a total of {b}"), _OTHER_VERBS,
)  # fmt: skip
ASK_OTHER = group(
    "ask-other", _ASK, (" {items} does {Other} <v>", " {items} are there for {Other}"),
    ("have", "have now", "hold"), ("?",),
)  # fmt: skip
ASK_BOTH = group(
    "ask-both", _ASK, (" {items} do they have", " {items} do {name} and {Other} have", " do they have"),
    ("",), (" together?", " in total?", " altogether?", " in all?"),
)  # fmt: skip
ASK_DIFFERENCE = group(
    "ask-difference", _ASK, (" more {items} does {High} <v> than {Low}", " more does {High} <v> than {Low}"),
    ("have", "own", "hold"), ("?", " now?", " in total?"),
)  # fmt: skip
AGE_FIRST = group(
    "age-first", ("", "Today, ", "This year, ", "One day, "), ("{Name} is <v>", "{Name} is now <v>"),
    ("{a} years old", "{a} years of age", "{a}"),
)  # fmt: skip
AGE_NEXT = group(
    "age-next", (". ", " and ", ", and "),
    ("{Other} is {b} years <v> than {Name}", "{Other}, a friend, is {b} years <v>"),
    ("{older}", "{older} in age"),
    (". How old is {Other}?", ". What is the age of {Other}?", ". How old is {Other} now?"),
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- money

MONEY_OPEN = group(
    "money-open", ("", "One day, ", "At first, "), ("{Name} <v> ${a}",),
    ("[have|has|had]", "[save|saves|saved]", "[earn|earns|earned]", "[get|gets|got]",
     "[start|starts|started] with"),
    ("", " in a wallet", " at work", " from {Other}", " in a bank"),
)  # fmt: skip
MONEY_WAGE = group(
    "money-wage", ("", "At work, ", "At the store, "),
    ("{Name} <v> ${b} an hour and [work|works|worked] for {a} hours", "{Name} <v> ${b} a day for {a} days",
     "{Name} [work|works|worked] {a} hours and <v> ${b} per hour", "{Name} <v> ${b} each week for {a} weeks"),
    ("[earn|earns|earned]", "[make|makes|made]", "[get|gets|got]"),
)  # fmt: skip
MONEY_SPEND = group(
    "money-spend", _LOSS_JOINS,
    ("[buy|buys|bought] a {item} for ${b}", "[spend|spends|spent] ${b} on a {item}",
     "[pay|pays|paid] ${b} for a {item}", "[spend|spends|spent] ${b}", "[give|gives|gave] ${b} to {Other}",
     "[lose|loses|lost] ${b}"),
    ("",), _SHOP,
)  # fmt: skip
MONEY_GAIN = group(
    "money-gain", _GAIN_JOINS, ("<v> ${b} more", "<v> another ${b}", "<v> ${b}"),
    ("[earn|earns|earned]", "[get|gets|got]", "[find|finds|found]", "[receive|receives|received]",
     "[save|saves|saved]"),
    ("", " from {Other}", " at work", " today"),
)  # fmt: skip
MONEY_SPEND_EACH = group(
    "money-spend-each", _LOSS_JOINS,
    ("<v> {c} {items} for ${d} each", "<v> {c} {items} at ${d} each", "<v> {c} {items} that cost ${d} each"),
    ("[buy|buys|bought]", "[get|gets|got]"), _SHOP,
)  # fmt: skip
ASK_MONEY = group(
    "ask-money", _COST, (" money<v>", "<v>", " in dollars<v>"),
    (" [do|does] {subj} have", " [do|does] {Name} have"), (" now?", " left?", " at the end?", "?"),
)  # fmt: skip
COST = group(
    "cost", ("", "One day, ", "At the store, "),
    ("{Name} <v> {a} {items} for ${b} each", "{Name} <v> {a} {items}. Each {item} costs ${b}",
     "{Name} <v> {a} {items}. Each one costs ${b}", "{Name} <v> {a} {items} at ${b} each",
     "{Name} <v> {a} {items} that cost ${b} each", "a {item} costs ${b}. {Name} <v> {a} {items}"),
    ("[buy|buys|bought]", "[get|gets|got]", "[want|wants|wanted] to buy"),
)  # fmt: skip
ASK_PAY = group(
    "ask-pay", _COST, (" money<v>", "<v>"),
    (" [do|does] {subj} pay", " [do|does] {Name} pay", " [do|does] {subj} spend"),
    ("?", " in total?", " in all?"),
)  # fmt: skip
CHANGE = group(
    "change", (". {Subj} ", " and ", ". Then {subj} ", ". {Name} "), ("<v> ${b}", "<v> a ${b} bill"),
    ("[pay|pays|paid] with", "[hand|hands|handed] over", "[give|gives|gave] the seller"),
    (". How much change [do|does] {subj} get?", ". How much money [do|does] {subj} get back?",
     ". How much is the change?"),
)  # fmt: skip

# ---------------------------------------------------------------------- places and parts

PLACE_OPEN = group(
    "place-open", ("", "At school, ", "At home, ", "One day, "),
    ("there are {a} {items} <v>", "{a} {items} are <v>"),
    ("in a {container}", "on the table", "in the store", "in the {container}", "at the market"),
)  # fmt: skip
PLACE_ROWS = group(
    "place-rows", ("", "At school, ", "At home, ", "One day, "),
    ("there are {a} {containers} <v>", "{Name} [see|sees|saw] {a} {containers} <v>"),
    ("of {b} {items}", "with {b} {items} in each", "with {b} {items} each", "and each has {b} {items}"),
)  # fmt: skip
PLACE_GAIN = group(
    "place-gain", (". {Name} ", ". Then {Name} ", ". Later, {Name} ", " and {Name} "),
    ("<v> {b} more", "<v> {b} {items}", "<v> {b} more {items}"),
    ("[add|adds|added]", "[bring|brings|brought]", "[put|puts|put] in"),
    ("", " today", " in the morning", " on Monday"),
)  # fmt: skip
PLACE_LOSS = group(
    "place-loss", (". {Name} ", ". Then {Name} ", ". Later, {Name} ", " and {Name} "),
    ("<v> {b}", "<v> {b} {items}", "<v> {b} of them", "<v> {b} of the {items}"),
    ("[take|takes|took]", "[take|takes|took] away", "[use|uses|used]", "[sell|sells|sold]",
     "[buy|buys|bought]"),
    ("", " today", " in the morning", " on Monday"),
)  # fmt: skip
ASK_PLACE = group(
    "ask-place", _ASK, (" {items} are <v>",), ("there", "there in all", "there in total"),
    ("?", " now?", " at the end?"),
)  # fmt: skip
PARTS_SUM = group(
    "parts-sum", ("", "One day, ", "Today, "),
    ("a {place} has {a} {x} and {b} {y}. <v>", "there are {a} {x} and {b} {y} in a {place}. <v>",
     "{Name} [see|sees|saw] {a} {x} and {b} {y} at the {place}. <v>",
     "{Name} [count|counts|counted] {a} {x} and {b} {y}. <v>"),
    ("How many {whole} are there in all?", "How many {whole} are there altogether?",
     "How many {whole} is that in total?", "How many {whole} are there?",
     "What is the total number of {whole}?"),
)  # fmt: skip
PARTS_REST = group(
    "parts-rest", ("", "One day, ", "Today, "),
    ("a {place} has {a} {whole}. {b} of them are {x}<v>",
     "there are {a} {whole} in a {place}. {b} are {x}<v>",
     "a {place} has {a} {whole} and {b} of them are {x}<v>",
     "{Name} [see|sees|saw] {a} {whole} and {b} of them are {x}<v>"),
    (". The rest are {y}", " and the rest are {y}", ". The others are {y}", ", and the others are {y}"),
    (". How many {y} are there?", ". How many are {y}?", ". How many {y} is that?"),
)  # fmt: skip
