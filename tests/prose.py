"""How README.md reads: words, sentence lengths, numbers. It informs, and fails nothing.

Usage:
    python tests/prose.py [FILE]
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def prose(text):
    "The text without code, tables, pictures and headings."
    text = re.sub(r'```.*?```', '', text, flags=re.S)
    text = re.sub(r'!\[[^]]*\]\([^)]*\)', '', text)
    lines = [line for line in text.splitlines() if not line.startswith(('|', '#'))]
    text = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', '\n'.join(lines))
    return re.sub(r'<[^>]+>|[*`]', '', text)


def measures(text):
    plain = re.sub(r'`[^`]*`|<code>.*?</code>', 'code', text)       # a number in code is code
    text = prose(text)
    sentences = [s for s in re.split(r'(?<=[.?!])\s+', text) if len(s.split()) > 2]
    words = text.split()
    knotted = sum(len(re.findall(r'[:;(]', s)) >= 2 for s in sentences)
    return dict(words=len(words), sentences=len(sentences),
                words_a_sentence=round(len(words) / len(sentences), 1),
                share_with_two_signs=round(knotted / len(sentences), 3),
                numbers=len(re.findall(r'(?<![\w.])\d[\d.,]*', prose(plain))))


if __name__ == '__main__':
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / 'README.md'
    for name, value in measures(file.read_text()).items():
        print(f'{name.replace("_", " ")}: {value}')
