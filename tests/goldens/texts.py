"""The texts that scripts/make_goldens.py makes goldens from; the tests read the JSON instead."""

import random

_WORDS = [
    "river",
    "stone",
    "market",
    "winter",
    "signal",
    "copper",
    "garden",
    "engine",
    "letter",
    "harbour",
    "silver",
    "morning",
    "window",
    "paper",
    "forest",
    "bridge",
    "number",
    "circle",
    "summer",
    "island",
    "mountain",
    "village",
    "doctor",
    "teacher",
    "captain",
    "valley",
    "station",
    "museum",
    "kitchen",
    "ladder",
    "bottle",
    "feather",
    "hammer",
    "lantern",
    "mirror",
    "needle",
    "orchard",
    "pencil",
    "quarry",
    "rocket",
    "saddle",
    "tunnel",
    "umbrella",
    "violin",
    "wagon",
    "yellow",
    "zebra",
    "anchor",
    "barrel",
    "candle",
    "desert",
]

_PLACES = ["Lisbon", "Nairobi", "Osaka", "Bergen", "Quito", "Hanoi", "Tallinn", "Perth"]


def _long_report() -> str:
    """About 1,500 tokens that a model can follow: numbered, similar but never equal entries."""
    rng = random.Random(7)
    lines = ["Inventory of the travelling museum, compiled by the night clerk.\n"]
    for i in range(1, 48):
        a, b, c = rng.sample(_WORDS, 3)
        place, year = rng.choice(_PLACES), rng.randrange(1720, 1995)
        lines.append(
            f"{i}. A {a} {b} from {place}, made in {year}, kept beside the {c}; "
            f"worth {rng.randrange(10, 900)} coins."
        )
    lines.append("\nThe clerk then summarised the collection in one paragraph:")
    return "\n".join(lines)


_CODE = '''def binary_search(items, target):
    """Return the index of target in the sorted list items, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
'''

PROMPTS: list[tuple[str, str | list[dict[str, str]]]] = [
    ("english", "The history of the Roman Empire begins with"),
    ("story", "Once upon a time, in a small village by the sea, there lived an old fisherman who"),
    ("one_token", "The"),
    ("code_python", _CODE),
    ("code_c", "#include <stdio.h>\n\nint main(int argc, char **argv) {\n\tfor (int i = 0; i <"),
    ("json", '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "notes": {"'),
    ("chinese", "中国的首都是北京。北京有很多著名的"),
    ("japanese", "むかしむかし、あるところに、おじいさんと"),
    ("arabic", "اللغة العربية هي لغة"),
    ("emoji", "🎉🎂 Happy birthday! 🥳👩‍👩‍👧‍👦 Let's celebrate with 🍕 and"),
    ("whitespace", "   \n\n\t  \n    "),
    ("digits", "3.14159265358979 + 2.71828182845904 = "),
    ("arithmetic", "12 + 30 = 42\n15 + 27 = 42\n100 - 58 ="),
    ("long_1500", _long_report()),
    (
        "chat_capital",
        [{"role": "user", "content": "What is the capital of France?"}],
    ),
    (
        "chat_system",
        [
            {"role": "system", "content": "You are a pirate. Answer in one short sentence."},
            {"role": "user", "content": "How do I boil an egg?"},
        ],
    ),
    (
        "chat_turns",
        [
            {"role": "user", "content": "Name a prime number."},
            {"role": "assistant", "content": "7"},
            {"role": "user", "content": "And a larger one, with the reason that it is prime?"},
        ],
    ),
    ("repetition", "na na na na na na na na na na na na na na na na"),
    ("markdown", "# Shopping list\n\n- [x] milk\n- [ ] eggs\n- [ ]"),
    ("mixed_scripts", "Москва (Moscow), Αθήνα (Athens), 東京 (Tokyo), 서울 ("),
]

CORPUS = "\n".join(
    [_long_report(), _CODE]
    + [text for _, text in PROMPTS if isinstance(text, str)]
    + [
        "A small stone lay in the river, and nobody in the village could say who had put it there.",
        "When the winter came the harbour froze, so the captain walked to the market instead.",
        'She wrote: "the signal is weak, the engine is cold, and the paper is wet".',
        "It isn't the number of letters that matters; it's what they say, and they've said it all.",
        "The teacher counted 1, 2, 3, 10, 25, 100 and 1000 before the morning train left.",
        "for i in range(10):\n    print(i, i * i)\n\nreturn {'a': 1, 'b': [2, 3]}",
        "Le garçon a mangé une crème brûlée à l'hôtel; die Straße führt über die Brücke.",
    ]
)

_EDGE_STRINGS = [
    "",
    " ",
    "  ",
    "   a   b    c     ",
    "\n",
    "\n\n\n",
    "\r\n\r\n",
    "\t\tindent\n\t\t\tmore",
    " \n \n ",
    "trailing space ",
    " leading space",
    "a\u00a0b\u2003c\u3000d",
    "zero\u200bwidth\u200djoiner\ufeff",
    "nul\0and\x01control\x7f",
    "Hello, world!",
    "Hello,world!Hello,  world !",
    "HELLO hello HeLLo",
    "I'm you're he's we'll they'd I've isn't DON'T CAN'T I'M",
    "'s't're've'm'll'd 'S'T",
    "it\u2019s a \u201cquote\u201d \u2014 dash \u2013 dash \u2026",
    "0",
    "00",
    "007",
    "1234567890",
    "3.14159",
    "1,000,000.00",
    "-273.15 °C",
    "0x1F 0b1010 1e-10",
    "2026-11-29T15:58:00Z",
    "+49 (0)30 1234-5678",
    "v1.2.3-rc.4",
    "½ ¾ ² ³ ①",
    "x² + y³ = z⁴ₙ",
    "١٢٣٤٥ ۱۲۳ १२३",
    "Ⅷ ⅻ 五六七 ๑๒๓",
    "a1b2c3 4d5e6f",
    "covid19 in2024 24h",
    "𝟘𝟙𝟚 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "café",
    "cafe\u0301",
    "naïve coöperate Ångström",
    "A\u030a n\u0303 o\u0308\u0304",
    "Straße ÆØÅ æøå ŁÓDŹ",
    "İstanbul ıI iİ",
    "ﬁ ﬂ ﬃ ligatures",
    "你好，世界！",
    "中文English混合text测试123",
    "これはテストです。カタカナ ひらがな 漢字",
    "한국어 문장을 토큰화합니다.",
    "ภาษาไทยไม่มีช่องว่าง",
    "हिन्दी में एक वाक्य",
    "বাংলা தமிழ் తెలుగు",
    "مرحبا بالعالم",
    "שלום עולם",
    "Привет, как дела?",
    "Γειά σου Κόσμε",
    "Xin chào thế giới",
    "ქართული ენა հայերեն",
    "አማርኛ ቋንቋ",
    "😀",
    "😀😃😄",
    "👍🏽 👩‍💻 👨‍👩‍👧‍👦",
    "🇩🇪🇯🇵🇺🇸",
    "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "text😀text 😀 text",
    "♠♣♥♦ ☃ ☂ ★ ✓ ✗",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ ∑∏∫√∞≠≤≥",
    "←↑→↓ ⇒ ⇔",
    "░▒▓█ ┌─┐│└┘",
    "\ue000\uf8ff\U000f0000",
    "\ufffd\ufffe",
    "\U0010ffff",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b",
    "a <|im_end|> b",
    "<|im_start|><|im_start|>",
    "<|im_start",
    "<|unknown|>",
    "<repo_name>jax<file_sep>main.py",
    "<jupyter_code>1+1<jupyter_output>2",
    "<gh_stars>100",
    "<IM_START>",
    "<s>[INST] hi [/INST]</s>",
    "[UNK] [CLS] [MASK]",
    "Ġhello Ċ world ▁x",
    "snake_case_name camelCaseName PascalCaseName SCREAMING_CASE kebab-case",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # comment\n',
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c[i]; }",
    "SELECT * FROM t WHERE a = 'x' AND b >= 10;",
    "<div class=\"a b\" id='c'>&nbsp;&lt;tag&gt;</div>",
    "https://example.com/path?q=1&r=a%20b#frag",
    "user.name+tag@example.co.uk",
    "C:\\Users\\me\\file.txt /usr/local/bin",
    '{"a": [1, 2.5, null, true], "b": {"c": "\\u00e9\\n"}}',
    "a=b;c==d;e===f;g!=h;i<=j;k>=l;m&&n;o||p;q?r:s",
    "$x = @y ?? #z; `cmd` ~/path ^caret |pipe|",
    "$$\\frac{a}{b} + \\sqrt{x^2}$$",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "```python\nprint('hi')\n```",
    "#!/bin/bash\nset -euo pipefail\necho \"${HOME}\" | sed 's/a/b/g'",
    "\x1b[31mred\x1b[0m",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "................................",
    "!!!???!?!",
    "----------",
    "========\n========",
    "ababababababababababab",
    "Donaudampfschifffahrtsgesellschaftskapitän",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "The quick brown fox jumps over the lazy dog.",
    "Dr. Smith paid $5.00 (i.e., five dollars) to J. Doe, Inc.",
    "wait...what?! no--way",
    "e.g. i.e. etc. U.S.A. a.m. p.m.",
    "1st 2nd 3rd 4th 21st",
    "50% off! #sale @shop",
    "a\nb\r\nc\rd",
    "a \n b",
    "a  \n  b",
    "end\n",
    "\nstart",
    "word\n\n\nword",
    "   \n   word",
    "\u2028line\u2029para\x85next",
]


def _random_strings(count: int) -> list[str]:
    """Seeded mixtures of words, digits, spaces and code points of many blocks."""
    rng = random.Random(11)
    blocks = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x5D0, 0x6FF), (0x900, 0xD80)]
    blocks += [(0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A0), (0x1F300, 0x1F700)]
    out = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(3, 14)):
            kind = rng.randrange(6)
            if kind == 0:
                low, high = rng.choice(blocks)
                parts.append("".join(chr(rng.randrange(low, high)) for _ in range(3)))
            elif kind == 1:
                parts.append(str(rng.randrange(10 ** rng.randrange(1, 9))))
            elif kind == 2:
                parts.append(rng.choice([" ", "  ", "\n", "\n\n", "\t", " \n", ", ", ". ", "'s "]))
            else:
                word = rng.choice(_WORDS)
                parts.append(rng.choice([word, " " + word, word.upper(), word.title()]))
        out.append("".join(parts))
    return out


TOKENIZER_STRINGS = _EDGE_STRINGS + _random_strings(200 - len(_EDGE_STRINGS))
